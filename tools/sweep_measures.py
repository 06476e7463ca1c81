"""What one finished run says for a comparison: a flat row from its folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_async import config as configuration
from megatron_async.bank import Bank
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles, read_evaluations, read_metrics
from megatron_async.observe import metrics as names
from tools.sweep_recovery import PHASE

TOKEN_MEANS = {
    "active": "objective/active",
    "masked": "objective/masked",
    "clipped_high": "objective/clipped_high",
    "clipped_low": "objective/clipped_low",
    "ess": "objective/ess",
    "log_total": "objective/log_total/mean_abs",
    "version_gap": names.GAP_MEAN,
}
"""Measure -> metric whose mean over all trained action tokens of the run it is."""

STEP_MEANS = {
    "step_seconds": names.STEP_SECONDS,
    "wait_seconds": names.SECONDS + "wait_batch",
    "grad_norm": "grad_norm",
    "explained_variance": "critic/explained_variance",
}
"""Measure -> metric whose mean over the steps it is."""

COUNTED_STATES = ("trained", "stale", "filtered", "failed")


def measure(run_path: Path) -> dict[str, Any]:
    """The measures of a finished run, and its curves by step (`curve`: metric -> values, null where a step has none).

    Raises UserError when the run did not end: no steps, or no evaluation after training.
    """
    rows, evaluations = read_metrics(run_path), read_evaluations(run_path)
    if not rows or len(evaluations) < 2:
        raise UserError(
            f"{run_path} holds {len(rows)} steps and {len(evaluations)} evaluations: the run did not end"
        )
    before, after = evaluations[0], evaluations[-1]
    return {
        "success_before": before["success_rate"],
        "success_after": after["success_rate"],
        "success_stderr": [before["stderr"], after["stderr"]],
        "steps": len(rows),
        "action_tokens": sum(row["batch/action_tokens"] for row in rows),
        "skipped_steps": sum("skipped" in row for row in rows),
        "version_gap_max": max(
            (row["version_gap/max"] for row in rows if "version_gap/max" in row), default=0
        ),
        **{name: token_mean(rows, metric) for name, metric in TOKEN_MEANS.items()},
        **{name: _mean(row.get(metric) for row in rows) for name, metric in STEP_MEANS.items()},
        "trajectories": _states(run_path),
        "curve": _curves(rows),
    }


def token_mean(rows: Sequence[dict[str, Any]], metric: str) -> float | None:
    """Mean of a per-step mean over tokens, weighted by the steps' tokens; None where no step has it."""
    pairs = [
        (row[metric], row["batch/trained_action_tokens"])
        for row in rows
        if row.get(metric) is not None and row["batch/trained_action_tokens"]
    ]
    total = sum(tokens for _, tokens in pairs)
    return sum(value * tokens for value, tokens in pairs) / total if total else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _states(run_path: Path) -> dict[str, int]:
    config = configuration.load(RunFiles(run_path).config)
    with Bank.open(config.bank_url) as bank:
        counts = bank.counts()
    return {state: counts[state] for state in COUNTED_STATES}


def _curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Every scalar metric that a figure may ask for, by step."""
    wanted = (
        names.REWARD, *TOKEN_MEANS.values(), "entropy", "objective/kl_k3", "critic/explained_variance", PHASE,
    )  # fmt: skip
    return {
        metric: [row.get(metric) for row in rows] for metric in wanted if any(metric in row for row in rows)
    }
