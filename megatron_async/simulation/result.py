"""What a simulated run measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. end: simulated seconds at its commit. seconds: since the commit before. stages: wait, score,
    update, capture, publish, overhead. gap_tokens: trained action tokens by version gap. start_gaps: for each trained
    trajectory, versions between its start and its training. waited: seconds each waited for a place to run."""

    end: float
    seconds: float
    stages: dict[str, float]
    gap_tokens: dict[int, float]
    start_gaps: tuple[int, ...]
    waited: tuple[float, ...]
    tokens: float


@dataclass(frozen=True, slots=True)
class Result:
    """A simulated run after its warm-up steps.

    engine_busy: share of the time in which an engine computes. engine_running: requests running on an engine, and
    episodes_running: places taken, means over time. stale: trajectories thrown away because they were too old (or fell
    out of the window).
    """

    steps: tuple[Step, ...]
    engine_busy: float
    engine_running: float
    episodes_running: float
    stale: int

    @property
    def step_seconds(self) -> float:
        """Mean wall time between two commits."""
        return float(np.mean([step.seconds for step in self.steps]))

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Mean seconds of each stage of the trainer."""
        names = list(self.steps[0].stages)
        return {name: float(np.mean([step.stages[name] for step in self.steps])) for name in names}

    @property
    def trainer_busy(self) -> float:
        """Share of the time in which the trainer does not wait for a batch."""
        waits = sum(step.stages["wait"] for step in self.steps)
        return 1.0 - waits / sum(step.seconds for step in self.steps)

    @property
    def gap_shares(self) -> dict[int, float]:
        """Share of the trained action tokens by version gap."""
        totals: dict[int, float] = {}
        for step in self.steps:
            for gap, tokens in step.gap_tokens.items():
                totals[gap] = totals.get(gap, 0.0) + tokens
        whole = sum(totals.values())
        return {gap: tokens / whole for gap, tokens in sorted(totals.items())}

    @property
    def gap_mean(self) -> float:
        """Mean version gap of the trained action tokens."""
        return sum(gap * share for gap, share in self.gap_shares.items())

    @property
    def gap_max(self) -> int:
        return max(self.gap_shares)

    @property
    def start_gap_mean(self) -> float:
        """Mean over trajectories of the versions between start and training: the staleness of `staleness`."""
        return _mean([gap for step in self.steps for gap in step.start_gaps])

    @property
    def waited_mean(self) -> float:
        """Mean seconds a trajectory waited for a place after its prompt had arrived and was admitted."""
        return _mean([seconds for step in self.steps for seconds in step.waited])

    @property
    def tokens_per_second(self) -> float:
        """Trained action tokens per second of wall time."""
        return sum(step.tokens for step in self.steps) / sum(step.seconds for step in self.steps)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
