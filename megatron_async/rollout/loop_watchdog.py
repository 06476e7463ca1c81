"""Finds an event loop that is blocked and does not come back, names what blocks it, and ends the process.

No deadline of the loop can fire while something on it never awaits. A thread of its own watches the loop's beat: it
says once per stretch who holds the loop, with the stack, and after a limit it ends the rollout process, which `launch`
starts again, or the evaluation. For which group a process ended is noted (`RunFiles.blocked`), so that one that does it
again and again is given up.

Invariants
- Time is counted in steps of the thread itself: while the whole process was stopped (SIGSTOP, a laptop that sleeps)
  next to nothing passes.
- A call that holds the interpreter itself (one computation in C) stops this thread too; `health` finds those.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from megatron_async.observe.files import RunFiles
from megatron_async.observe.rows import RowWriter, read_rows
from megatron_async.progress_clock import ProgressClock
from megatron_async.rollout.blocking import Call, under_way

logger = logging.getLogger(__name__)

SAY_S = 10.0
"""Seconds after which a blocked loop is named in the log."""
EXIT_BLOCKED = 75
_TICK_S = 1.0


class LoopWatchdog:
    """thread: ident of the thread that runs the loop. limit_s: seconds after which `end` gets the call, if it is known,
    and what to say of it. clock: monotonic seconds."""

    def __init__(
        self,
        thread: int,
        limit_s: float,
        end: Callable[[Call | None, str], None],
        *,
        tick_s: float = _TICK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread, self._limit_s, self._end, self._tick_s = thread, limit_s, end, tick_s
        self._passed = ProgressClock(2 * tick_s, clock)
        self._beats = self._seen = 0
        self._since = self._passed()
        self._said = self._ended = False

    async def beat(self) -> None:
        """Runs on the loop until cancelled."""
        while True:
            self._beats += 1
            await asyncio.sleep(self._tick_s)

    def watch(self, left: threading.Event) -> None:
        """Runs in a thread until `left` is set."""
        while not left.wait(self._tick_s):
            self.look()

    def look(self) -> None:
        """Once per tick."""
        now = self._passed()
        if self._beats != self._seen:
            self._seen, self._since, self._said, self._ended = self._beats, now, False, False
        blocked, call = now - self._since, under_way(self._thread)
        text = f"{call or 'something'} has blocked the event loop for {blocked:.0f} s"
        if blocked >= SAY_S and not self._said:
            self._said = True
            logger.warning("%s and goes on; no episode can go on meanwhile. Its stack:\n%s", text, self._stack())
        if blocked >= self._limit_s and not self._ended:
            self._ended = True
            logger.error("the event loop is given up; the stack of what blocks it:\n%s", self._stack())
            self._end(call, text)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(its thread has ended)"


@contextlib.asynccontextmanager
async def watched_loop(limit_s: float, end: Callable[[Call | None, str], None]) -> AsyncIterator[None]:
    """Within the block the running loop is watched. limit_s, end: as for `LoopWatchdog`."""
    tick_s = min(_TICK_S, limit_s / 4)
    dog, left = LoopWatchdog(threading.get_ident(), limit_s, end, tick_s=tick_s), threading.Event()
    beat = asyncio.create_task(dog.beat(), name="loop beat")
    thread = threading.Thread(target=dog.watch, args=(left,), name="loop-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        beat.cancel()


def end_process(run_path: Path, deadline_s: float) -> Callable[[Call | None, str], None]:
    """What `watched_loop` calls in a rollout process: note whom it was for, say it, and end the process at once; the
    thread that is blocked would not hear of anything gentler. deadline_s: the limit, for the message."""

    def end(call: Call | None, text: str) -> None:
        if call is not None and call.group:
            row = {"time": time.time(), "group": call.group, "task": call.task, "call": str(call)}
            with contextlib.suppress(OSError), RowWriter(RunFiles(run_path).blocked) as rows:
                rows.append(row)
        logger.error(
            "%s, longer than rollout.turn_deadline_s (%g s): this process ends, and goes on anew where it was started "
            "by `launch`. Await what waits, and give what computes to a thread or a process (asyncio.to_thread)",
            text, deadline_s,
        )  # fmt: skip
        os._exit(EXIT_BLOCKED)

    return end


def blocked_groups(run_path: Path) -> Counter[str]:
    """How often each group ended a rollout process of the run."""
    return Counter(str(row["group"]) for row in read_rows(RunFiles(run_path).blocked))
