"""Checks of the objective, its old log-probs and its advantages; part of `config.checks`."""

from __future__ import annotations

import math

from megatron_async.config import methods
from megatron_async.config.critic_checks import critic_problems, unused_critic_problems
from megatron_async.config.errors import nearest
from megatron_async.config.schema import ObjectiveConfig, RunConfig

# A window this tight (or tighter) only speaks of engine noise if the anchor is exact.
TIGHT_MASK = 0.02


def objective_problems(config: RunConfig) -> list[str]:
    """What would fail later or train on the wrong thing, one sentence each."""
    objective = config.objective
    preset, problems = methods.METHODS[objective.name], []
    low, high = objective.mask_low or 0.0, math.inf if objective.mask_high is None else objective.mask_high
    if not low < high:
        problems.append(
            f"objective: the mask's window [{low}, {high}] is empty; mask_low must be below mask_high"
        )
    elif not low <= 1 <= high:
        problems.append(
            f"objective: the mask's window [{low}, {high}] does not hold 1, so exact tokens are rejected"
        )
    if objective.clip_low is not None and objective.clip_low < 0:
        problems.append(f"objective.clip_low: {objective.clip_low} is negative; it is the distance below 1")
    if objective.clip_high is not None and objective.clip_high < 0:
        problems.append(f"objective.clip_high: {objective.clip_high} is negative; it is the distance above 1")
    if objective.dual_clip is not None and objective.dual_clip <= 1:
        problems.append(f"objective.dual_clip: {objective.dual_clip} is not above 1")
    if config.rollout.max_staleness > 0 and not corrects_staleness(config):
        problems.append(
            f"rollout.max_staleness: {config.rollout.max_staleness} allows tokens of older versions, but objective "
            f"{objective.name} with anchor {objective.anchor} and weight {objective.weight} does not correct for "
            f"them; set rollout.max_staleness to 0, or use one of: {', '.join(_correcting())}"
            + (
                ""
                if not preset.corrects_staleness
                else ", or weight: discrepancy, or a mask on the discrepancy ratio"
            )
        )
    return problems + _check_shares(config) + _check_source(config)


def corrects_staleness(config: RunConfig) -> bool:
    """Whether the loss accounts for tokens that an older version sampled.

    An anchor on the starting weights alone leaves out the way from the sampling version to them: some weight or mask on
    the discrepancy ratio must bring it back in.
    """
    objective = config.objective
    if not methods.METHODS[objective.name].corrects_staleness:
        return False
    masked = bool(objective.mask_low) or (
        objective.mask_high is not None and math.isfinite(objective.mask_high)
    )
    return (
        objective.anchor == "rollout"
        or masked
        or objective.weight != "none"
        or methods.ANCHORS[objective.anchor].exact
    )


def _correcting() -> list[str]:
    return [name for name, method in methods.METHODS.items() if method.corrects_staleness]


def _check_shares(config: RunConfig) -> list[str]:
    """Statistics of a micro-batch need its tokens on one rank; sums over sequences are taken over the shares."""
    parts = config.layout.context_parallel_size
    return [
        f"objective.options.{key}: microbatch takes the statistic over the tokens of one rank, but with "
        f"layout.context_parallel_size: {parts} a micro-batch lies on {parts} ranks; set it to batch, or "
        "context_parallel_size to 1"
        for key in ("quantile_scope", "moment_scope")
        if parts > 1 and config.objective.options.get(key) == "microbatch"
    ]


def _check_source(config: RunConfig) -> list[str]:
    source, anchor = config.old_logits.source, methods.ANCHORS[config.objective.anchor]
    if not anchor.built:
        ready = [
            name for name in methods.METHODS[config.objective.name].anchors if methods.ANCHORS[name].built
        ]
        return [
            f"objective.anchor: {config.objective.anchor} is not built in yet; with objective {config.objective.name} "
            f"choose one of {', '.join(ready)}"
        ]
    if source not in methods.SOURCES:
        return [f"old_logits.source: {source!r} is no source; {nearest(source, methods.SOURCES)}"]
    if source == "dedicated" and (
        config.trainer.nodes != 1 or not config.snapshots.durable or config.snapshots.disk_bytes == 0
    ):
        return [
            "objective.anchor: dedicated sends records from disk to ranks beside the trainer's; it needs "
            f"trainer.nodes: 1 (it is {config.trainer.nodes}), snapshots.durable: true and disk for snapshots; or use "
            "anchor snapshot"
        ]
    if config.snapshots.shadow is False and config.model.dtype == "float32" and source in methods.DIFFERENCES:
        return [
            "snapshots.shadow: false takes differences where weights follow fp32 masters, and those of model.dtype: "
            "float32 have none; set model.dtype: bfloat16, or snapshots.shadow: null"
        ]
    if source == "interrupt" and (config.publish.every != 1 or config.publish.pause_mode in ("in_place", "drain")):
        return [
            "objective.anchor: interrupt scores tokens while their version is resident, so every version must be "
            "published and nothing be sampled by it afterwards; set publish.every to 1 (it is "
            f"{config.publish.every}) and publish.pause_mode to retract or abort (it is "
            f"{config.publish.pause_mode}), or use anchor snapshot"
        ]
    if source not in (anchor.source, *anchor.other_sources):
        return [
            f"old_logits.source: {source} does not give what objective.anchor: {config.objective.anchor} needs; "
            f"set it to {' or '.join((anchor.source, *anchor.other_sources))}, or leave it out"
        ]
    return []


def advantage_problems(config: RunConfig) -> list[str]:
    """The same of the estimator of advantages and its batch."""
    advantage, problems = config.advantage, []
    estimator = methods.ADVANTAGES[advantage.name]
    if estimator.needs_group and config.batch.group_size == 1 and advantage.singleton == "error":
        problems.append(
            f"advantage.name: {advantage.name} compares the trajectories of a group, but batch.group_size is 1; raise "
            "it to at least 2, or use advantage.name: running_mean, or say what to do by advantage.singleton"
        )
    if config.batch.group_size == 1 and advantage.drop_zero_variance_groups:
        problems.append(
            "advantage.drop_zero_variance_groups: true would drop every group, since a group of one "
            "(batch.group_size: 1) has no variance; set it to false"
        )
    problems += _check_filter(config)
    if advantage.window is not None and advantage.window < 1:
        problems.append(f"advantage.window: {advantage.window} is not at least 1")
    return problems + (critic_problems if estimator.needs_critic else unused_critic_problems)(config)


def _check_filter(config: RunConfig) -> list[str]:
    """Dynamic sampling looks at the variance within groups: there must be some, and it must be what the advantages are
    made of."""
    most, name = config.batch.max_filtered_groups, config.advantage.name
    if most < 0:
        return [f"batch.max_filtered_groups: {most} is negative; 0 takes groups as they come"]
    if most > 0 and config.batch.group_size == 1:
        return [
            f"batch.max_filtered_groups: {most} would filter every group, since a group of one (batch.group_size: 1) "
            "has no variance; set it to 0"
        ]
    if most > 0 and not methods.ADVANTAGES[name].needs_group:
        grouped = ", ".join(key for key, estimator in methods.ADVANTAGES.items() if estimator.needs_group)
        return [
            f"batch.max_filtered_groups: {most} filters groups of equal rewards, but advantage.name: {name} learns "
            f"from them too, as it does not compare within groups; set it to 0, or use one of {grouped}"
        ]
    return []


def _expected_mask_loss(objective: ObjectiveConfig) -> float:
    high = math.inf if objective.mask_high is None else objective.mask_high
    return methods.expected_mask_loss(objective.mask_low or 0.0, high)


def objective_warnings(config: RunConfig) -> list[str]:
    """What is legal but likely a mistake, one sentence each."""
    objective, warnings = config.objective, []
    anchor = methods.ANCHORS[objective.anchor]
    tightest = round(min(1 - (objective.mask_low or 0.0), (objective.mask_high or math.inf) - 1), 12)
    if not anchor.exact and objective.anchor != "rollout" and tightest <= TIGHT_MASK:
        warnings.append(
            f"objective: mask [{objective.mask_low}, {objective.mask_high}] is within {TIGHT_MASK:.0%} of 1, but "
            f"anchor {objective.anchor} is not exact: version drift enters the ratio and usable tokens are rejected, "
            f"about {_expected_mask_loss(objective):.0%} of the stale ones at the mean |log ratio| of "
            f"{methods.PUBLISHED_MEAN_LOG_RATIO} published for lag 1, more with every version of lag; use an exact "
            "anchor (snapshot) or a wider mask"
        )
    clips = math.isfinite(min(objective.clip_low or 0.0, objective.clip_high or 0.0))
    if objective.anchor == "start" and config.trainer.updates_per_batch == 1 and clips:
        warnings.append(
            "objective: with one update per batch and anchor start the clipped ratio is exactly 1, so the clip cannot "
            "act and the mask carries all control; use an exact anchor, or trainer.updates_per_batch > 1"
        )
    return warnings
