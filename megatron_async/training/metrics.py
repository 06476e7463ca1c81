"""One row of metrics per step, from what the step's parts returned (names: observe.metrics, docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from megatron_async.bank import Filtered
from megatron_async.config.schema import BatchConfig
from megatron_async.engine.policy import TrainStepResult
from megatron_async.objectives import Objective
from megatron_async.observe import metrics as names
from megatron_async.old_logits import AnchorLogprobs
from megatron_async.training.batch import Batch
from megatron_async.training.publishing import Published


def step_metrics(
    batch: Batch,
    anchors: AnchorLogprobs,
    published: Published | None,
    seconds: Mapping[str, float],
    version: int,
) -> dict[str, Any]:
    """Metrics of one step; counts are over the global batch."""
    total = sum(seconds.values())
    tokens = sum(len(trajectory.token_ids) for trajectory in batch.trajectories)
    row: dict[str, Any] = {
        names.REWARD: float(np.mean(batch.rewards)),
        names.VERSION: version,
        names.STEP_SECONDS: total,
        names.TRAIN_RATE: tokens / total if total else 0.0,
        "batch/trajectories": len(batch.trajectories),
        "batch/trained": len(batch.trained),
        "batch/tokens": tokens,
        "batch/action_tokens": sum(trajectory.num_action_tokens for trajectory in batch.trajectories),
        "batch/trained_action_tokens": sum(batch.trajectories[i].num_action_tokens for i in batch.trained),
        "batch/turns_mean": float(np.mean([len(trajectory.turns) for trajectory in batch.trajectories])),
        **{names.SECONDS + stage: value for stage, value in seconds.items()},
        **{f"seconds/old_logits/{stage}": value for stage, value in anchors.seconds.items()},
        **anchors.metrics,
        **_gaps(batch.version_gaps),
        **_phase(batch),
    }
    if published:
        row |= {
            "publish/seconds": published.seconds,
            "publish/paused_seconds": published.paused_seconds,
            "publish/bytes": published.bytes,
            "publish/aborted_tokens": published.aborted_tokens,
        }
    return row


def update_metrics(
    objective: Objective, results: SequenceOf[TrainStepResult], action_tokens: int
) -> dict[str, Any]:
    """Metrics of the optimiser steps of one batch: means of loss and gradient norm, the objective's statistics."""
    if not results:
        return {"skipped": "no group of the batch has a learning signal"}
    # a batch without an action token has none
    statistics = [result.stats["statistics"] for result in results if "statistics" in result.stats]
    entropy = sum(float(result.stats["entropy"]) for result in results if "entropy" in result.stats)
    row: dict[str, Any] = {
        "loss": float(np.mean([result.loss for result in results])),
        "grad_norm": float(np.mean([result.grad_norm for result in results])),
        "lr": results[-1].lr,
        "entropy": entropy / max(action_tokens, 1),
        "batch/fill": float(np.mean([result.fill for result in results])),
        **(objective.summarise({"statistics": torch.from_numpy(sum(statistics))}) if statistics else {}),
    }
    reasons = [result.skipped for result in results if result.skipped]
    return row | ({"skipped": "; ".join(reasons)} if reasons else {})


def filter_metrics(filtered: Filtered, cut: BatchConfig) -> dict[str, float]:
    """What dynamic sampling left out of the step's batch; the rate is over all groups that were looked at."""
    row = {
        "batch/filtered_groups": filtered.groups,
        "batch/filtered_rate": filtered.groups / (filtered.groups + cut.groups),
        "batch/filter_exhausted": float(filtered.groups >= cut.max_filtered_groups),
    }
    mean = filtered.reward_mean
    return row if mean is None else row | {"batch/filtered_reward_mean": mean}


def active_fraction(objective: Objective, results: SequenceOf[TrainStepResult]) -> float | None:
    """ρ: share of the step's action tokens that mask and clip left active; None without an action token."""
    statistics = sum(result.stats["statistics"] for result in results if "statistics" in result.stats)
    if not isinstance(statistics, np.ndarray):
        return None
    return objective.summarise({"statistics": torch.from_numpy(statistics)}).get("objective/active")


def _phase(batch: Batch) -> dict[str, float]:
    """Mean phase of the trajectories' tasks, where the environment has phases: a reward that shifts, against time."""
    phases = [trajectory.task["phase"] for trajectory in batch.trajectories if "phase" in trajectory.task]
    return {"environment/phase": float(np.mean(phases))} if phases else {}


def _gaps(gaps: np.ndarray) -> dict[str, Any]:
    """Version gap of the trained action tokens: mean, extremes and histogram."""
    if not gaps.size:
        return {}
    values, counts = np.unique(gaps, return_counts=True)
    return {
        names.GAP_MEAN: float(gaps.mean()),
        "version_gap/min": int(values[0]),
        "version_gap/max": int(values[-1]),
        **{f"{names.GAP_TOKENS}{gap}": int(count) for gap, count in zip(values, counts, strict=True)},
    }
