"""Generalised advantage estimation over action tokens only (B, formulas §4), vectorised over packed sequences.

Invariants: observation tokens are dropped before the recursion and get 0, so their number changes nothing; a reward
recorded on an observation token reaches the last action token before it; sequences never see each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.objectives.segments import Segments


def length_adaptive_lambda(action_mask: Tensor, sequence_ids: Tensor, alpha: float = 1.5) -> Tensor:
    """λ = 1 - 1/(α l), [T], l = action tokens of the token's sequence; kept in [0, 1] for l < 1/α."""
    segments = Segments.of(sequence_ids)
    lengths = segments.total(action_mask).clamp(min=1.0)
    return (1.0 - 1.0 / (alpha * lengths)).clamp(0.0, 1.0)[segments.index]


def _actions_in_order(action_mask: Tensor, sequence_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the action tokens, sequence by sequence, and the dense sequence number of each."""
    segments = Segments.of(sequence_ids)
    positions = torch.nonzero(action_mask).squeeze(-1)
    owner = segments.index[positions]
    order = torch.sort(owner, stable=True).indices
    return positions[order], owner[order]


def _rewards_on_actions(
    rewards: Tensor, action_mask: Tensor, sequence_ids: Tensor, positions: Tensor
) -> Tensor:
    """Rewards [A] of the action tokens in packed order, each observation's reward moved to the action before it."""
    at = torch.arange(rewards.numel(), device=rewards.device)
    last_action = torch.where(action_mask, at, -1).cummax(dim=0).values
    moved = rewards.new_zeros(rewards.numel() + 1)
    same = (last_action >= 0) & (sequence_ids[last_action.clamp(min=0)] == sequence_ids)
    moved.index_add_(0, torch.where(same, last_action, rewards.numel()), torch.nan_to_num(rewards))
    if bool((torch.nan_to_num(rewards)[~same] != 0).any()):
        raise ValueError(
            "a reward stands on a token before the first action of its sequence; nothing earned it"
        )
    return moved[positions]


def skip_observation_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [T], 0 off the action tokens.

    rewards, values: [T]; the sequences' tokens lie in order, each sequence as one run. lam: a number, or [T] and
    constant within a sequence. bootstrap: [T], V after the last action of a truncated sequence, read at that action;
    None = 0. γ = 1 is chosen. Raises ValueError for a reward before the first action.
    """
    positions, owner = _actions_in_order(action_mask, sequence_ids)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    if positions.numel() == 0:
        return advantages, returns
    value = values[positions].double()
    reward = _rewards_on_actions(rewards, action_mask, sequence_ids, positions).double()
    last = torch.ones_like(owner, dtype=torch.bool)
    last[:-1] = owner[1:] != owner[:-1]
    after = torch.zeros_like(value) if bootstrap is None else bootstrap[positions].double()
    following = torch.where(last, after, value.roll(-1))
    delta = reward + gamma * following - value
    decay = gamma * (lam[positions].double() if isinstance(lam, Tensor) else torch.full_like(value, lam))
    result = _discounted_suffix_sums(delta, torch.where(last, 0.0, decay))
    advantages[positions] = result.to(values.dtype)
    returns[positions] = (result + value).to(values.dtype)
    return advantages, returns


def _discounted_suffix_sums(delta: Tensor, decay: Tensor) -> Tensor:
    """x_t = delta_t + decay_t x_{t+1}, by doubling: log2(length) passes instead of a loop over tokens.

    A decay of 0 ends a sequence. After the pass with stride s, x_t covers 2s terms and decay_t is their product.
    """
    total, factor, stride = delta.clone(), decay.clone(), 1
    while stride < total.numel() and bool((factor != 0).any()):
        shifted = torch.zeros_like(total)
        shifted[:-stride] = total[stride:]
        carried = torch.zeros_like(factor)
        carried[:-stride] = factor[stride:]
        total = total + factor * shifted
        factor = factor * carried
        stride *= 2
    return total


def step_values(
    values: Tensor, action_mask: Tensor, sequence_ids: Tensor, turn_ids: Tensor, kind: str
) -> Tensor:
    """V of a whole turn, given to each of its action tokens, [T]; 0 off them.

    turn_ids: [T], equal within a turn, unique within a sequence. kind: "mean" or "last" token of the turn.
    """
    if kind not in ("mean", "last"):
        raise ValueError(f"kind is {kind!r}; it must be 'mean' or 'last'")
    turns = int(turn_ids.max()) - int(turn_ids.min()) + 1 if turn_ids.numel() else 1
    steps = Segments.of(Segments.of(sequence_ids).index * turns + (turn_ids - turn_ids.min()))
    if kind == "mean":
        per_step = steps.total(torch.where(action_mask, values, 0.0)) / steps.total(action_mask).clamp(
            min=1.0
        )
    else:
        positions = torch.nonzero(action_mask).squeeze(-1)
        last = torch.full((steps.number,), -1, dtype=torch.int64, device=values.device)
        last.scatter_reduce_(0, steps.index[positions], positions, "amax")
        per_step = torch.where(last >= 0, values[last.clamp(min=0)].double(), 0.0)
    return torch.where(action_mask, steps.spread(per_step, values.dtype), 0.0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values)/Var(returns) over the masked tokens; 1 is perfect, 0 is no better than the mean.

    NaN when the returns do not vary.
    """
    target = returns[mask].double()
    variance = target.var(correction=0)
    if target.numel() == 0 or variance == 0:
        return float("nan")
    return float(1.0 - (target - values[mask].double()).var(correction=0) / variance)
