"""The clock of the simulation: callbacks at simulated times, and work whose speed changes while it is done.

Invariants: time never runs backwards; events at the same time happen in the order in which they were scheduled, so a
simulation with the same seed is the same to the last bit.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Event:
    """Something that will happen; `cancel` makes it not happen."""

    __slots__ = ("_action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self._action = None

    def fire(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()


class Clock:
    """Simulated seconds since the start, and what will happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> Event:
        """Call `action` in `seconds` (at least 0) from now."""
        if seconds < 0:
            raise ValueError(f"an event cannot happen {-seconds:g} s ago")
        event = Event(action)
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), event))
        return event

    def run(self, finished: Callable[[], bool]) -> bool:
        """Let things happen until `finished()`; False when nothing is left to happen before."""
        while not finished():
            if not self._queue:
                return False
            self.now, _, event = heapq.heappop(self._queue)
            event.fire()
        return True


class Work:
    """A piece of work in seconds at full speed, done at a speed that may change; calls `done` at its end."""

    def __init__(self, clock: Clock, seconds: float, speed: float, done: Callable[[], None]) -> None:
        self._clock, self._left, self._done = clock, seconds, done
        self._since, self._speed = clock.now, speed
        self._event = self._schedule()

    def set_speed(self, speed: float) -> None:
        """speed > 0: seconds of work done per second."""
        if speed == self._speed:
            return
        self._left = max(0.0, self._left - (self._clock.now - self._since) * self._speed)
        self._since, self._speed = self._clock.now, speed
        self._event.cancel()
        self._event = self._schedule()

    def _schedule(self) -> Event:
        return self._clock.after(self._left / self._speed, self._done)
