"""Checks of `advantage.name: gae` and its critic; part of `config.checks`."""

from __future__ import annotations

from pathlib import Path

from megatron_async.config.hf import checkpoint_problems, read_shape
from megatron_async.config.layout_checks import layout_problems, model_layout_problems, room_problems
from megatron_async.config.schema import RunConfig


def critic_problems(config: RunConfig) -> list[str]:
    """What would fail later, one sentence each."""
    advantage, critic = config.advantage, config.critic
    problems = _ranges(config) + _rank_problems(config)
    if advantage.drop_zero_variance_groups and config.batch.group_size > 1:
        problems.append(
            "advantage.drop_zero_variance_groups: true leaves trajectories out that a critic learns from; set it to "
            "false with advantage.name: gae"
        )
    if critic.warmup_steps >= config.steps:
        problems.append(
            f"critic.warmup_steps: {critic.warmup_steps} critic-only steps leave none of the run's {config.steps} for "
            "the policy; raise steps or lower warmup_steps"
        )
    if critic.path:
        problems += [f"critic.path: {problem}" for problem in checkpoint_problems(critic.path)]
    missing = [run for run in critic.pretrain_runs if not Path(run).is_dir()]
    if missing:
        problems.append(f"critic.pretrain_runs: no such folder: {', '.join(missing)}")
    return problems


def _rank_problems(config: RunConfig) -> list[str]:
    critic, layout = config.critic, config.critic_layout
    if critic.ranks == "shared":
        return [] if critic.layout is None else [
            "critic.layout: the critic shares the actor's ranks (critic.ranks: shared) and so their layout, since one "
            "process has one layout; leave it null, or set critic.ranks: own"
        ]
    problems = layout_problems(layout, "critic.layout")
    if problems:
        return problems
    shape = read_shape(critic.path or config.model.path)
    if shape is not None:
        problems += model_layout_problems(layout, shape, "critic.layout")
    return problems + room_problems(config, layout, " (critic.layout)")


def unused_critic_problems(config: RunConfig) -> list[str]:
    """Of a run whose estimator has no critic."""
    if config.critic.ranks == "shared":
        return []
    return [
        f"critic.ranks: own would start {config.critic_layout.world_size} rank(s) that nothing asks, since "
        f"advantage.name: {config.advantage.name} has no critic; set advantage.name: gae, or critic.ranks: shared"
    ]


def _ranges(config: RunConfig) -> list[str]:
    advantage, critic = config.advantage, config.critic
    problems = [
        f"advantage.{name}: {value} is outside [0, 1]"
        for name, value in (
            ("gamma", advantage.gamma),
            ("lambda_policy", advantage.lambda_policy),
            ("lambda_critic", advantage.lambda_critic),
        )
        if value != "adaptive" and not 0 <= float(value) <= 1
    ]
    positive = {
        "advantage.alpha": advantage.alpha,
        "critic.lr": critic.lr,
        "critic.huber_delta": critic.huber_delta,
        "critic.updates": critic.updates,
    }
    if critic.value_clip is not None:
        positive["critic.value_clip"] = critic.value_clip
    problems += [f"{name}: {value} is not above 0" for name, value in positive.items() if not value > 0]
    not_negative = {
        "critic.clip_grad": critic.clip_grad,
        "critic.lr_warmup_steps": critic.lr_warmup_steps,
        "critic.warmup_steps": critic.warmup_steps,
    }
    return problems + [f"{name}: {value} is negative" for name, value in not_negative.items() if value < 0]
