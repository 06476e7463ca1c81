"""How good the simulated loop is: against measured runs, and against the closed form for mean staleness.

A prediction never sees what it is held against: the model is calibrated on the first half of a run's steps and
predicts the second, or on one run and predicts another under that one's settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from megatron_async.errors import UserError
from megatron_async.observe import read_metrics
from megatron_async.simulation import (
    EngineModel,
    Episode,
    RolloutPolicy,
    Scenario,
    TrainerModel,
    Turn,
    Workload,
    calibrate,
    fully_asynchronous_staleness,
    simulate,
)
from megatron_async.simulation.calibration import under_settings
from megatron_async.simulation.measured import read_config
from megatron_async.simulation.steps import SKIPPED_STEPS, read_steps
from megatron_async.simulation.workload import maximum_over_mean
from tools.benchmark_rows import Row

TOLERANCE = 0.15
LEAST_STEPS = 12
"""Steps of a run that is halved: five to calibrate on, beside those that are skipped, and as many to predict."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run, or the second half of one, predicted by the model of what `calibrated` names. Seconds per step, mean
    version gap of trained tokens. beyond: it has more episodes at once than any run of the calibration."""

    calibrated: str
    run: str
    settings: str
    measured_seconds: float
    predicted_seconds: float
    measured_gap: float
    predicted_gap: float
    beyond: bool = False

    @property
    def error(self) -> float:
        """|predicted - measured| / measured, of the step time."""
        return abs(self.predicted_seconds - self.measured_seconds) / self.measured_seconds

    def describe(self) -> str:
        """In words, for a row's conditions."""
        return (
            f"{self.run} ({self.settings}) from {self.calibrated}: {self.measured_seconds:.2f} s measured, "
            f"{self.predicted_seconds:.2f} s predicted, gap {self.measured_gap:.2f} and {self.predicted_gap:.2f}"
        )


def predict(
    model: Scenario, run_path: Path, seed: int, *, first: int = SKIPPED_STEPS, calibrated: str = "", most: int = 0
) -> Prediction:
    """What `model`, calibrated on what `calibrated` names, says of the steps of a run from `first` on, under that run's
    settings, against what was measured there. most: episodes at once in the calibration; 0: unknown."""
    rows = read_steps(run_path, first).rows
    if len(rows) < 3:
        raise UserError(f"{run_path}: {len(rows)} steps after the first {first} are too few to measure a step's time")
    scenario = under_settings(model, read_config(run_path))
    result = simulate(scenario, steps=max(60, len(rows)), seed=seed)
    gaps = [row["version_gap/mean"] for row in rows if row.get("version_gap/mean") is not None]
    rollout = scenario.rollout
    return Prediction(
        calibrated,
        run_path.name,
        f"bound {rollout.bound}, {rollout.concurrency} at once, batch {rollout.batch}, publish every "
        f"{scenario.publish.every}",
        (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1),
        result.step_seconds,
        sum(gaps) / max(1, len(gaps)),
        result.gap_mean,
        beyond=0 < most < rollout.concurrency,
    )


def predict_second_half(run_path: Path, seed: int) -> Prediction:
    """The second half of a run's steps, by the model of its first."""
    steps = len(read_metrics(run_path))
    if steps < LEAST_STEPS:
        raise UserError(f"{run_path} has {steps} steps; --halves needs at least {LEAST_STEPS}")
    half = steps // 2
    model = calibrate(run_path, steps=half)
    return predict(model, run_path, seed, first=half, calibrated=f"steps {SKIPPED_STEPS + 1} to {half} of it")


def predictions_table(predictions: Sequence[Prediction]) -> Table:
    """Measured beside predicted."""
    made = Table(title="Predicted against measured", title_justify="left")
    for title in ("run", "calibrated on", "settings"):
        made.add_column(title)
    for title in ("s/step measured", "predicted", "error", "gap measured", "predicted"):
        made.add_column(title, justify="right")
    for one in predictions:
        made.add_row(
            one.run, one.calibrated, one.settings, f"{one.measured_seconds:.2f}", f"{one.predicted_seconds:.2f}",
            f"{one.error:.1%}", f"{one.measured_gap:.2f}", f"{one.predicted_gap:.2f}",
        )  # fmt: skip
    return made


def prediction_rows(predictions: Sequence[Prediction]) -> list[Row]:
    """The errors in the benchmarks' form: those under loads that the calibration saw, and those beyond."""
    figures = [
        ("simulator_step_time_error", "", [one for one in predictions if not one.beyond]),
        ("simulator_extrapolation_error", " with fewer episodes at once", [one for one in predictions if one.beyond]),
    ]
    return [
        Row(
            figure,
            [round(one.error, 4) for one in found],
            goal=f"<= {TOLERANCE}",
            conditions=f"mean step time, predicted by a model that did not see it{where}; "
            + "; ".join(one.describe() for one in found),
        )
        for figure, where, found in figures
        if found
    ]


# ---------------------------------------------------------------- the closed form

CLOSED_FORM_TOLERANCE = 0.08
"""The closed form takes groups to start at once and batches to fill evenly."""

CONCURRENCY, BATCH, TOKEN_S = 256, 64, 0.1
CASES = [(size, update, window) for size in (1, 4) for update, window in ((2.0, 0), (4.0, 64), (16.0, 256))]
"""(group size, seconds of an update, finished trajectories kept): generation slower, and trainer slower, twice."""


def staleness(group_size: int, update: float, window: int) -> tuple[float, float]:
    """(simulated, expected) mean versions between a trajectory's start and its training; lengths exponential."""
    lengths = np.maximum(1, np.random.default_rng(0).exponential(100, 4000)).astype(int)
    workload = Workload((tuple(Episode((Turn(0, int(n)),)) for n in lengths),))
    policy = RolloutPolicy(
        bound=10**6, concurrency=CONCURRENCY, groups=BATCH // group_size, group_size=group_size,
        admission="queue" if window else "drop", queue=window,
    )  # fmt: skip
    scenario = Scenario(
        workload, EngineModel(step_base=TOKEN_S), TrainerModel(update_fixed=update), rollout=policy
    )
    expected = fully_asynchronous_staleness(
        rollout_rate=CONCURRENCY / (TOKEN_S * workload.mean_actions),
        trainer_rate=BATCH / update,
        concurrency=CONCURRENCY,
        batch=BATCH,
        queue=window,
        spread=maximum_over_mean([episode.actions for episode in workload.episodes], group_size),
    )
    return simulate(scenario, steps=100, warm_up=30, seed=1).start_gap_mean, expected


def closed_form_rows() -> list[Row]:
    """Relative errors of mean staleness over `CASES`."""
    found = [staleness(*case) for case in CASES]
    each = "; ".join(
        f"groups of {size}, updates of {update:g} s, queue {window}: {simulated:.2f} simulated, {expected:.2f} expected"
        for (size, update, window), (simulated, expected) in zip(CASES, found, strict=True)
    )
    return [
        Row(
            "simulator_staleness_error",
            [round(abs(simulated - expected) / expected, 4) for simulated, expected in found],
            goal=f"<= {CLOSED_FORM_TOLERANCE}",
            conditions=(
                f"mean versions from start to training, exponential lengths, {CONCURRENCY} at once, batch {BATCH}, "
                f"against n = CM/B + rho and CM/(rho B) + (2q + rho - 1)/(2 rho) (arXiv 2607.18722); {each}"
            ),
        )
    ]
