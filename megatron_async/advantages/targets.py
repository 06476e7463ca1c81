"""From a critic's values to per-token advantages and the critic's own targets (arXiv 2607.07508).

Invariants: V at an action token is that of the state in which it is chosen; policy and critic have λs of their own
over the same values; off the action tokens both results are 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_async.advantages.gae import length_adaptive_lambda, skip_observation_gae, step_values
from megatron_async.advantages.whitening import whiten
from megatron_async.config.schema import AdvantageConfig


@dataclass(frozen=True, slots=True)
class Episodes:
    """The tokens of whole trajectories end to end, [T] each.

    rewards: where they were recorded, observations included. values: V before each token. after: V of the state after a
    trajectory's last token, on all of its tokens. truncated: bool, the trajectory was cut and is not over. turn_ids:
    equal within a turn of the policy, unique within a trajectory.
    """

    rewards: Tensor
    values: Tensor
    after: Tensor
    action_mask: Tensor
    sequence_ids: Tensor
    truncated: Tensor
    turn_ids: Tensor


@dataclass(frozen=True, slots=True)
class Targets:
    """advantages: for the policy. returns: what the critic regresses on. values: what the estimate ran on. [T] each."""

    advantages: Tensor
    returns: Tensor
    values: Tensor


def gae_targets(config: AdvantageConfig, episodes: Episodes) -> Targets:
    """Advantages with λ_policy and the critic's targets with λ_critic.

    With step values a turn is one decision: every token of it carries the turn's value, γ and λ act once between turns,
    and the adaptive λ counts turns.
    """
    if config.values == "token":
        border = torch.ones_like(episodes.action_mask)
        decisions = episodes.action_mask
    else:
        kind = config.values.removeprefix("step_")
        ids = (episodes.values, episodes.action_mask, episodes.sequence_ids, episodes.turn_ids)
        episodes = replace(episodes, values=step_values(*ids, kind))
        border = decisions = _turn_ends(episodes)
    gamma = _where(border, config.gamma)

    def estimate(lam: float | str) -> tuple[Tensor, Tensor]:
        if isinstance(lam, str):
            between = length_adaptive_lambda(decisions, episodes.sequence_ids, config.alpha)
        else:
            between = torch.full_like(episodes.values, lam, dtype=torch.float64)
        return skip_observation_gae(
            episodes.rewards,
            episodes.values,
            episodes.action_mask,
            episodes.sequence_ids,
            gamma=gamma,
            lam=torch.where(border, between, torch.ones_like(between)),
            bootstrap=torch.where(episodes.truncated, episodes.after, 0.0)
            if config.bootstrap_truncated
            else None,
        )

    advantages, _ = estimate(config.lambda_policy)
    _, returns = estimate(config.lambda_critic)
    if config.whiten:
        advantages = whiten(advantages, episodes.action_mask)
    return Targets(advantages, returns, episodes.values)


def _where(border: Tensor, value: float) -> Tensor:
    """Float64 [T]: `value` at the borders, 1 inside a decision."""
    return torch.ones_like(border, dtype=torch.float64).masked_fill(border, value)


def _turn_ends(episodes: Episodes) -> Tensor:
    """Bool [T]: the last action token of every turn."""
    positions = torch.nonzero(episodes.action_mask).squeeze(-1)
    turn, owner = episodes.turn_ids[positions], episodes.sequence_ids[positions]
    last = torch.ones_like(turn, dtype=torch.bool)
    last[:-1] = (turn[1:] != turn[:-1]) | (owner[1:] != owner[:-1])
    ends = torch.zeros_like(episodes.action_mask)
    ends[positions[last]] = True
    return ends
