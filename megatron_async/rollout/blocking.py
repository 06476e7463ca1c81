"""Finds calls that block the event loop, and names them.

While one episode's environment computes or waits without `await`, every other episode stands still, engines run empty,
and nothing says why. Each stretch of a call between two of its awaits is timed here. Only the wall clock can see a call
that sleeps, so a stretch counts as blocking from `BLOCKS_S` on, which a busy machine alone does not reach often.

A stretch that never ends is never timed: `loop_watchdog` looks at `under_way` from a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

BLOCKS_S = 0.5
"""Seconds without an await from which on a stretch is reported."""

LETS_GO_S = 10.0
"""Seconds in which a call that was cancelled has to end. One that does not is left as it is."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of users' code, for messages. owner: whose method it is. trajectory, group, task: ids of what it is for,
    empty where there are none."""

    owner: object
    method: str
    trajectory: str = ""
    group: str = ""
    task: str = ""

    def __str__(self) -> str:
        kind = type(self.owner)
        task = f" of task {self.task}" if self.task else ""
        whose = f" (trajectory {self.trajectory})" if self.trajectory else ""
        return f"{kind.__module__}.{kind.__qualname__}.{self.method}{task}{whose}"


_under_way: dict[int, Call] = {}  # by thread


def under_way(thread: int) -> Call | None:
    """The call that the thread of this ident is inside of now; None outside of any. From any thread."""
    return _under_way.get(thread)


@contextmanager
def inside(call: Call) -> Iterator[None]:
    """Within the block, which awaits nothing, this thread runs `call`."""
    thread = threading.get_ident()
    outer = _under_way.get(thread)
    _under_way[thread] = call
    try:
        yield
    finally:
        if outer is None:
            del _under_way[thread]
        else:
            _under_way[thread] = outer


class Timed(Generic[T]):
    """`await Timed(what, call, note)` is `await call()`; note gets the seconds of each stretch of at least `BLOCKS_S`.

    A call that ignores the cancellation of this task (a bare `except:` in a loop of retries) is cancelled again
    `LETS_GO_S` later, and then not asked. What the call awaits may be cancelled by others; that is its own affair.
    """

    def __init__(self, what: Call, call: Callable[[], Awaitable[T]], note: Callable[[float], None]) -> None:
        self._what, self._call, self._note = what, call, note
        self._patience: asyncio.TimerHandle | None = None
        self._over = False

    def __await__(self) -> Generator[Any, Any, T]:
        try:
            return (yield from self._until_done())
        finally:
            if self._patience is not None:
                self._patience.cancel()

    def _until_done(self) -> Generator[Any, Any, T]:
        inner: Generator[Any, Any, T] | None = None
        error: BaseException | None = None
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        while True:
            began = time.monotonic()
            try:
                with inside(self._what):
                    if inner is None:
                        inner = self._call().__await__()
                    waited_for = next(inner) if error is None else inner.throw(error)
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
            except asyncio.CancelledError as thrown:
                if self._over:
                    task.uncancel()  # the cancellation that was ours; the one before it goes on
                    self._leave(inner)
                    raise
                error = thrown
                if task.cancelling() > before and self._patience is None:
                    self._patience = asyncio.get_running_loop().call_later(LETS_GO_S, self._cancel, task)
            except BaseException as thrown:  # noqa: BLE001 - handed to the call, as `await` does
                error = thrown

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        self._over = task.cancel()

    def _leave(self, inner: Generator[Any, Any, T]) -> None:
        logger.warning("%s was cancelled and goes on: it is left where it stands", self._what)
        try:
            with inside(self._what):
                inner.close()
        except BaseException as error:  # noqa: BLE001 - it ignores this too
            logger.warning("%s: %s", self._what, error)


def report(call: Call, seconds: float) -> None:
    """Say in the log who blocked the loop."""
    logger.warning(
        "%s blocked the event loop for %.1f s, during which no episode went on: await what waits, and give what "
        "computes to a thread or a process (asyncio.to_thread)",
        call, seconds,
    )  # fmt: skip
