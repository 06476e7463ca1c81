"""What every part waits for, said once nothing has moved for a while.

Invariants: it only looks (at the status files that the parts write); it speaks after `AFTER_S` of silence and then ever
more rarely; anything that moves (a token, a trajectory, a phase) ends the silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megatron_async.observe.status import Status, read_status
from megatron_async.roster import read_roster, roster_file

AFTER_S = 120.0

_PROGRESS = ("generated_tokens", "finished", "failed", "step", "version")


class Silence:
    """Called again and again; see the module. clock: monotonic seconds; now: Unix seconds."""

    def __init__(
        self,
        run_path: Path,
        say: Callable[[str], None],
        *,
        after_s: float = AFTER_S,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._run_path, self._say, self._after_s, self._clock, self._now = run_path, say, after_s, clock, now
        self._seen: object = None
        self._since = clock()
        self._patience = after_s

    def __call__(self) -> None:
        parts = read_status(self._run_path)
        seen = {name: self._movement(status) for name, status in parts.items()}
        silent = self._clock() - self._since
        if seen != self._seen:
            self._seen, self._since, self._patience = seen, self._clock(), self._after_s
        elif silent >= self._patience:
            self._patience *= 2
            lines = [self._line(status) for status in parts.values()]
            self._say("\n".join([f"nothing has moved for {silent:.0f} s:", *lines, *self._engines()]))

    @staticmethod
    def _movement(status: Status) -> tuple[object, ...]:
        return (status.phase, *(status.counters.get(name) for name in _PROGRESS))

    def _line(self, status: Status) -> str:
        waits = f", waits for {status.waiting_for}" if status.waiting_for else ""
        heard = self._now() - status.time
        quiet = f"; its process ({status.pid}) last wrote {heard:.0f} s ago" if heard > self._after_s / 2 else ""
        return f"  {status.part}: {status.phase}{waits}, for {self._now() - status.since:.0f} s{quiet}"

    def _engines(self) -> list[str]:
        if not roster_file(self._run_path).exists():
            return ["  engines: none started"]
        engines = read_roster(self._run_path)
        listed = [f"  engine {e.index} at {e.url}: {e.state}" for e in engines]
        return listed or ["  engines: none answers"]
