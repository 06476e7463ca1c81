"""Finds calls that block the event loop, and names them.

While one episode's environment computes or waits without `await`, every other episode stands still, engines run empty,
and nothing says why. Each stretch of a call between two of its awaits is timed here. Only the wall clock can see a call
that sleeps, so a stretch counts as blocking from `BLOCKS_S` on, which a busy machine alone does not reach often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

BLOCKS_S = 0.5
"""Seconds without an await from which on a stretch is reported."""


class Timed(Generic[T]):
    """`await Timed(call, note)` is `await call`; note gets the seconds of each stretch of at least `BLOCKS_S`."""

    def __init__(self, call: Awaitable[T], note: Callable[[float], None]) -> None:
        self._call, self._note = call, note

    def __await__(self) -> Generator[Any, Any, T]:
        inner = self._call.__await__()
        error: BaseException | None = None
        while True:
            began = time.monotonic()
            try:
                waited_for = next(inner) if error is None else inner.throw(error)  # type: ignore[attr-defined]
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                seconds = time.monotonic() - began
                if seconds >= BLOCKS_S:
                    self._note(seconds)
            try:
                yield waited_for  # an event loop sends nothing back
                error = None
            except BaseException as thrown:  # noqa: BLE001 - handed to the call, as `await` does
                error = thrown


def report(environment: object, call: str, seconds: float) -> None:
    """Say in the log who blocked the loop."""
    kind = type(environment)
    logger.warning(
        "%s.%s.%s blocked the event loop for %.1f s, during which no episode went on: await what waits, and give what "
        "computes to a thread or a process (asyncio.to_thread)",
        kind.__module__, kind.__qualname__, call, seconds,
    )  # fmt: skip
