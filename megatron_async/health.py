"""Parts that stand still are named and ended, so that they are started again as if they had ended by themselves.

Invariants
- A process stands still when it gave a sign of life (`heart`) and gives none for `trainer.health_deadline_s`, or is
  stopped for so long; a stage of the trainer when nothing in its status changes for `trainer.stage_deadline_s` while it
  waits for nothing.
- Only processes that this launcher started are looked at and ended. Clocks of different processes are never compared,
  and time in which the observer itself stood still does not count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence

import psutil

from megatron_async.config.schema import RunConfig
from megatron_async.heart import STACKS_SIGNAL
from megatron_async.observe.status import read_status
from megatron_async.progress_clock import ProgressClock
from megatron_async.supervise import Part

logger = logging.getLogger(__name__)

_LONGEST_GAP_S = 5.0
_STACKS_S = 0.5
"""Seconds that a process gets to print its stacks before it is killed."""


class _Still:
    """Since when each of a part's values has been the same; forgets all when the part was started again."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._seen: dict[str, tuple[object, float]] = {}

    def seconds(self, pid: int | None, name: str, value: object, now: float) -> float:
        if pid != self._pid:
            self._pid, self._seen = pid, {}
        before = self._seen.get(name)
        if before is None or before[0] != value:
            self._seen[name] = value, now
            return 0.0
        return now - before[1]


class Guard:
    """Called again and again. parts: those that it looks at, once they are started. with_stages: names of those whose
    status says what stage they are in. clock: monotonic seconds."""

    def __init__(
        self,
        config: RunConfig,
        parts: Sequence[Part],
        with_stages: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._parts, self._with_stages = config, list(parts), set(with_stages)
        self._passed = ProgressClock(_LONGEST_GAP_S, clock)
        self._still = {part.name: _Still() for part in parts}

    def __call__(self) -> None:
        """End what stands still.

        Raises PartFailed where that cannot be killed.
        """
        now = self._passed()
        for part in self._parts:
            if part.pid is None or part.poll() is not None:
                continue
            if why := self._silent(part, now) or self._in_one_stage(part, now):
                logger.warning("%s stands still and is ended: %s", part.name, why)
                _ask_for_stacks(part)
                part.kill(why)

    def _silent(self, part: Part, now: float) -> str:
        limit_s = self._config.trainer.health_deadline_s
        if not limit_s:
            return ""
        limit = f"(trainer.health_deadline_s={limit_s:g})"
        still, stopped = self._still[part.name], _is_stopped(part.pid)
        seconds = still.seconds(part.pid, "stopped", stopped, now)
        if stopped and seconds >= limit_s:
            return f"its process {part.pid} has been stopped for {seconds:.0f} s {limit}: by SIGSTOP, or a debugger"
        for pid, touched in part.beats().items():
            seconds = still.seconds(part.pid, f"beat of {pid}", touched, now)
            if seconds >= limit_s and part.owns(pid):
                how = "it is stopped" if _is_stopped(pid) else "one call holds its interpreter, or its disk is gone"
                return f"its process {pid} gave no sign of life for {seconds:.0f} s {limit}: {how}"
        return ""

    def _in_one_stage(self, part: Part, now: float) -> str:
        limit_s = self._config.trainer.stage_deadline_s
        if not limit_s or part.name not in self._with_stages:
            return ""
        status = read_status(self._config.run_path).get(part.name)
        if status is None:
            return ""
        value = status.pid, status.phase, status.since, status.waiting_for, status.counters
        seconds = self._still[part.name].seconds(part.pid, "stage", value, now)
        if status.waiting_for or seconds < limit_s:
            return ""
        return (
            f"nothing moved in stage {status.phase!r} for {seconds:.0f} s (trainer.stage_deadline_s={limit_s:g}); if a "
            "stage may take that long, raise it"
        )


def _is_stopped(pid: int | None) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _ask_for_stacks(part: Part) -> None:
    """Into the part's log, by each of its processes that can."""
    for pid in part.beats():
        if part.owns(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
    time.sleep(_STACKS_S)
