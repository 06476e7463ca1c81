"""Which part of a run did what when: intervals in timeline.jsonl, written by every process, drawn by report.

Invariants: a row is {part, stage, step, start, end}, times in Unix seconds, end >= start; intervals of one part may
overlap (a rollout runs many agents at once). Times of processes on one machine share a clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_async.observe.files import RunFiles
from megatron_async.observe.rows import RowWriter, read_rows


@dataclass(frozen=True, slots=True)
class Interval:
    """Part `part` was in `stage` from `start` to `end` (Unix seconds) for training step `step`."""

    part: str
    stage: str
    step: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """Measures the stages of one part and, given a run's folder, records them.

    >>> timeline = Timeline(cfg.run_path if rank == 0 else None, "trainer")
    >>> with timeline.stage("score", step):
    ...     score()
    >>> timeline.take_seconds()      # {"score": 1.2}, and starts afresh
    """

    def __init__(self, run_path: Path | None, part: str) -> None:
        self.part = part
        self._rows = None if run_path is None else RowWriter(RunFiles(run_path).timeline)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Measure the block as stage `name`; also recorded when the block raises."""
        wall, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self.record(name, step, wall, wall + time.perf_counter() - start)

    def record(self, name: str, step: int, start: float, end: float) -> None:
        """Record an interval measured elsewhere (Unix seconds)."""
        if end < start:
            raise ValueError(f"stage {name!r} of step {step} ends at {end} before it starts at {start}")
        self._seconds[name] = self._seconds.get(name, 0.0) + end - start
        if self._rows is not None:
            self._rows.append({"part": self.part, "stage": name, "step": step, "start": start, "end": end})

    def take_seconds(self) -> dict[str, float]:
        """Seconds per stage since the last call, ready to be logged under `seconds/<stage>`."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._rows is not None:
            self._rows.close()


def read_timeline(run_path: Path) -> list[Interval]:
    """All recorded intervals in the order in which they ended."""
    return [
        Interval(
            str(row["part"]), str(row["stage"]), int(row["step"]), float(row["start"]), float(row["end"])
        )
        for row in read_rows(RunFiles(run_path).timeline)
    ]


def merged(intervals: list[Interval]) -> list[tuple[float, float]]:
    """Union of intervals as disjoint (start, end) pairs in order."""
    union: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda i: i.start):
        if union and interval.start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], interval.end))
        else:
            union.append((interval.start, interval.end))
    return union


def window_of_step(intervals: list[Interval], step: int, part: str = "trainer") -> tuple[float, float] | None:
    """First start and last end of `part`'s stages for `step`, or None where it recorded none."""
    own = [interval for interval in intervals if interval.step == step and interval.part == part]
    if not own:
        return None
    return min(interval.start for interval in own), max(interval.end for interval in own)


def within(intervals: list[Interval], start: float, end: float) -> list[Interval]:
    """The intervals that overlap [start, end], cut to it."""
    return [
        Interval(i.part, i.stage, i.step, max(i.start, start), min(i.end, end))
        for i in intervals
        if i.end > start and i.start < end
    ]
