"""Seconds in which the observer itself made progress, by which it may judge that another one makes none."""

from __future__ import annotations

import time
from collections.abc import Callable


class ProgressClock:
    """Called regularly: seconds since it was made, of which no gap between two calls counts for more than `longest_s`.

    An observer that was stopped, or whose machine slept, finds no time gone for which it could blame anybody.

    >>> times = iter([0.0, 1.0, 900.0])
    >>> clock = ProgressClock(2.0, lambda: next(times))
    >>> clock(), clock()
    (1.0, 3.0)
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_s, self._clock = longest_s, clock
        self._last, self._passed = clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._passed += min(now - self._last, self._longest_s)
        self._last = now
        return self._passed
