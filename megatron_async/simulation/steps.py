"""The steps of a run that say how it runs: those of one stretch in which nobody stopped it.

Between a stop and the resume a night may lie, which is no time that a step takes, and the first steps after a start are
slower than the others: neither is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_async.errors import UserError
from megatron_async.observe import read_metrics

Row = dict[str, Any]

SKIPPED_STEPS = 2
"""First steps after a start that are left out: compilation, cold caches, empty queues."""

TIMES = ("time", "seconds/step")
_LONGEST_STEPS, _LEAST_GAP_S = 3.0, 10.0
"""A run was stopped where nothing was measured for so many times its longest step, and for so many seconds."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in a row. since: when it was begun (Unix seconds), the steps that are left out included; minus infinity for
    the run's own beginning."""

    rows: list[Row]
    since: float


def read_steps(run_path: Path, first: int, end: int | None = None, needed: Sequence[str] = TIMES) -> Stretch:
    """Steps number `first` to `end` of the run's metrics, of the longest stretch without a stop.

    needed: metrics that every row must have. Raises UserError where one has not.
    """
    rows = read_metrics(run_path)[first:end]
    for name in needed:
        if without := [row["step"] for row in rows if row.get(name) is None]:
            raise UserError(
                f"{run_path}: {len(without)} of {len(rows)} steps have no {name} in metrics.jsonl (first: step "
                f"{without[0]}), which calibration needs; use another run"
            )
    return _longest_stretch(rows)


def _longest_stretch(rows: list[Row]) -> Stretch:
    limit = max([_LEAST_GAP_S, *(_LONGEST_STEPS * row["seconds/step"] for row in rows)])
    gaps = [after["time"] - after["seconds/step"] - before["time"] for before, after in pairwise(rows)]
    starts = [0, *(number + 1 for number, gap in enumerate(gaps) if abs(gap) > limit)]
    stretches = []
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        since = rows[start]["time"] - rows[start]["seconds/step"] if start else -math.inf
        stretches.append(Stretch(rows[start + (SKIPPED_STEPS if start else 0) : end], since))
    return max(stretches, key=lambda stretch: len(stretch.rows))
