"""How long a reward takes to come back after the environment's preference has switched, in the rows of a sweep.

One bar for all: the runs of a seed are compared with 90 % of one level, the mean over them of the best reward that each
held for five steps before the first switch. With a bar of its own, a run that learned little has little to recover, and
one that never recovered from a switch would clear the next at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from megatron_async.observe import metrics as names

PHASE = "environment/phase"
WINDOW, RECOVERED = 5, 0.9

Rows = Sequence[dict[str, Any]]


def recoveries(rows: Rows) -> list[list[tuple[int, bool]]]:
    """For every row, for every switch: steps until five follow whose mean reward clears the bar of the row's seed, and
    whether they came. Where they never came, the steps that the phase had: it would have taken at least those.

    Empty for rows without a switch.
    """
    bars = {seed: bar([row for row in rows if row["seed"] == seed]) for seed in {row["seed"] for row in rows}}
    return [_recovery(row, bars[row["seed"]]) for row in rows]


def bar(rows: Rows) -> float:
    """The mean reward that counts as recovered, of the rows of one seed; rows without a switch do not enter."""
    best = [max(_held(_rewards(row)[: starts[0]])) for row in rows if (starts := _switches(row))]
    return RECOVERED * fmean(best) if best else 0.0


def _recovery(row: dict[str, Any], wanted: float) -> list[tuple[int, bool]]:
    rewards, found = _rewards(row), []
    for start, end in itertools.pairwise([*_switches(row), len(rewards)]):
        reached = next((i for i, held in enumerate(_held(rewards[start:end])) if held >= wanted), None)
        found.append((end - start, False) if reached is None else (reached, True))
    return found


def _switches(row: dict[str, Any]) -> list[int]:
    """Steps whose batch is the first that is mostly of a later phase."""
    phases: list[float] = [phase or 0.0 for phase in row["curve"].get(PHASE, [])]
    last = round(max(phases, default=0.0))
    return [next(i for i, phase in enumerate(phases) if phase >= k - 0.5) for k in range(1, last + 1)]


def _rewards(row: dict[str, Any]) -> list[float]:
    return [reward or 0.0 for reward in row["curve"][names.REWARD]]


def _held(rewards: Sequence[float]) -> list[float]:
    """Means of every `WINDOW` steps in a row; of all where there are fewer."""
    count = max(len(rewards) - WINDOW + 1, 1)
    return [fmean(rewards[i : i + WINDOW]) if rewards else 0.0 for i in range(count)]
