"""Checks of `advantage.name: gae` and its critic; part of `config.checks`."""

from __future__ import annotations

from pathlib import Path

from megatron_async.config.hf import checkpoint_problems
from megatron_async.config.schema import RunConfig


def critic_problems(config: RunConfig) -> list[str]:
    """What would fail later, one sentence each."""
    advantage, critic = config.advantage, config.critic
    problems = _ranges(config)
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
