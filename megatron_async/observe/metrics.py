"""The metrics of a run: one row per training step in metrics.jsonl, and the same numbers as TensorBoard events.

Invariants: a row holds `step` and `time` (Unix seconds) beside its metrics; when a resumed run repeats a step the
later row counts. The names below are the ones that progress and report read; docs/metrics.md explains all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from megatron_async.observe.files import RunFiles
from megatron_async.observe.rows import RowWriter, read_rows

REWARD = "reward/mean"
GAP_MEAN = "version_gap/mean"
"""Mean over the step's action tokens of the updates between the token's version and the trainer's."""
GAP_TOKENS = "version_gap/tokens/"
"""Prefix of the histogram: action tokens with the gap that follows."""
SECONDS = "seconds/"
"""Prefix: seconds the trainer spent in the stage that follows."""
STEP_SECONDS = "seconds/step"
TRAIN_RATE = "tokens_per_second/train"
"""Tokens of the batch (context included) per second of the whole step."""
VERSION = "version"


class Tracker(Protocol):
    """Anything that shows metrics elsewhere."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Writes scalars as TensorBoard events, without torch or TensorFlow."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all numeric metrics of a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class MetricsWriter:
    """Writes each step's metrics to metrics.jsonl first, then to the trackers.

    >>> with MetricsWriter(cfg.run_path, tensorboard=True) as metrics:
    ...     metrics.log(step, {"reward/mean": 0.5, "loss": 0.1})
    """

    def __init__(self, run_path: Path, *, tensorboard: bool = False) -> None:
        files = RunFiles(run_path)
        self._rows = RowWriter(files.metrics)
        self._trackers: list[Tracker] = [TensorBoardTracker(files.tensorboard)] if tensorboard else []

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step; values are numbers (numpy and 0-d torch scalars too), texts, or lists of them."""
        if "step" in metrics or "time" in metrics:
            raise ValueError("'step' and 'time' are written by MetricsWriter itself; rename the metric")
        self._rows.append({"step": step, "time": time.time(), **metrics})
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if not isinstance(value, str | list | tuple | Mapping) and value is not None
        }
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def close(self) -> None:
        """Close the file and all trackers."""
        self._rows.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_path: Path) -> list[dict[str, Any]]:
    """One row per step, by step; where a step was written twice, the later row."""
    latest = {row["step"]: row for row in read_rows(RunFiles(run_path).metrics)}
    return [latest[step] for step in sorted(latest)]


def gap_histogram(rows: list[dict[str, Any]]) -> dict[int, int]:
    """Action tokens by version gap, summed over rows."""
    histogram: dict[int, int] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(GAP_TOKENS) and value is not None:
                gap = int(name.removeprefix(GAP_TOKENS))
                histogram[gap] = histogram.get(gap, 0) + int(value)
    return dict(sorted(histogram.items()))


def append_evaluation(run_path: Path, row: Mapping[str, Any]) -> None:
    """Record an evaluation: at least `step`, `version`, `success_rate`, `stderr`, `tasks`, `samples_per_task`."""
    missing = {"step", "version", "success_rate", "stderr"} - set(row)
    if missing:
        raise ValueError(
            f"an evaluation row lacks {', '.join(sorted(missing))}; it has {', '.join(sorted(row))}"
        )
    with RowWriter(RunFiles(run_path).evaluations) as rows:
        rows.append({"time": time.time(), **row})


def read_evaluations(run_path: Path) -> list[dict[str, Any]]:
    """All evaluations, oldest first."""
    return read_rows(RunFiles(run_path).evaluations)
