"""What each process of a run does now, in one small file each, for progress views and for finding out why it waits.

Invariants: a reader never sees half a file (written aside, then renamed); `since` is the time the phase or the thing
waited for last changed, so that its age is how long a part has been at it; parts never read each other's status to
decide anything.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_async.observe.files import RunFiles


@dataclass(frozen=True, slots=True)
class Status:
    """One part's state at `time`."""

    part: str
    phase: str
    waiting_for: str
    """What the part waits for, in words; empty while it works."""
    since: float
    """Unix seconds at which phase or waiting_for last changed."""
    time: float
    """Unix seconds at which this was written."""
    pid: int
    counters: dict[str, float] = field(default_factory=dict)


class StatusWriter:
    """Keeps the status file of one part up to date.

    Writes at most every `interval_s` while only counters change; a change of phase is written at once.
    """

    def __init__(self, run_path: Path, part: str, *, interval_s: float = 0.5) -> None:
        self.path = RunFiles(run_path).status / f"{part}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._interval = interval_s
        now = time.time()
        self._status = Status(part, "starting", "", now, now, os.getpid())
        self._write()

    @property
    def current(self) -> Status:
        """The status as last set."""
        return self._status

    def set(self, phase: str, waiting_for: str = "", counters: Mapping[str, float] | None = None) -> None:
        """Set the phase and what is waited for; counters given are merged into the ones already there."""
        old, now = self._status, time.time()
        changed = (phase, waiting_for) != (old.phase, old.waiting_for)
        merged = {**old.counters, **(counters or {})}
        last_write = old.time
        self._status = Status(
            old.part, phase, waiting_for, now if changed else old.since, last_write, old.pid, merged
        )
        if changed or now - last_write >= self._interval:
            self._write()

    def count(self, **counters: float) -> None:
        """Set counters without a change of phase."""
        self.set(self._status.phase, self._status.waiting_for, counters)

    @contextmanager
    def waiting(self, for_what: str) -> Iterator[None]:
        """Say what is waited for while the block runs, and return to the phase before."""
        phase = self._status.phase
        self.set(phase, for_what)
        try:
            yield
        finally:
            self.set(phase)

    def close(self, phase: str = "finished") -> None:
        """Write the last status, whatever the interval."""
        self.set(phase)
        self._write()

    def _write(self) -> None:
        old = self._status
        self._status = Status(
            old.part, old.phase, old.waiting_for, old.since, time.time(), old.pid, old.counters
        )
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(self._status)), encoding="utf-8")
        os.replace(temporary, self.path)


def read_status(run_path: Path) -> dict[str, Status]:
    """The latest status of every part, by name."""
    found = {}
    for path in sorted(RunFiles(run_path).status.glob("*.json")):
        status = Status(**json.loads(path.read_text(encoding="utf-8")))
        found[status.part] = status
    return found
