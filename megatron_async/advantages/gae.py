"""Generalised advantage estimation over action tokens only (arXiv 2607.07508), vectorised over packed sequences.

Invariants: observation tokens are dropped before the recursion and get 0, so their number changes nothing; a reward
recorded on an observation token reaches the last action token before it; sequences never see each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_async.objectives.segments import Segments


def length_adaptive_lambda(action_mask: Tensor, sequence_ids: Tensor, alpha: float = 1.5) -> Tensor:
    """λ = 1 - 1/(α l), [T], l = action tokens of the token's sequence; kept in [0, 1] for l < 1/α."""
    segments = Segments.of(sequence_ids)
    lengths = segments.total(action_mask).clamp(min=1.0)
    return segments.spread((1.0 - 1.0 / (alpha * lengths)).clamp(0.0, 1.0), torch.float64)


def _rewards_on_actions(
    rewards: Tensor, action_mask: Tensor, sequence_ids: Tensor, positions: Tensor
) -> Tensor:
    """Rewards [A] of the action tokens at `positions`, each observation's reward moved to the action before it."""
    given = torch.nan_to_num(rewards)
    earned = given[positions].double()
    late = torch.nonzero((given != 0) & ~action_mask).squeeze(-1)
    if late.numel() == 0:
        return earned
    owner = torch.searchsorted(positions, late) - 1
    same = (owner >= 0) & (sequence_ids[positions[owner.clamp(min=0)]] == sequence_ids[late])
    if not bool(same.all()):
        raise ValueError(
            "a reward stands on a token before the first action of its sequence; nothing earned it"
        )
    return earned.index_add_(0, owner, given[late].double())


def skip_observation_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [T], 0 off the action tokens.

    rewards, values: [T]; the sequences' tokens lie in order, each sequence as one run. gamma, lam: a number, or [T]:
    what lies between an action token and the next; γ = 1 is chosen. bootstrap: [T], V after the last action of a
    truncated sequence, read at that action; None = 0. Raises ValueError for a reward before the first action.
    """
    positions = torch.nonzero(action_mask).squeeze(-1)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    if positions.numel() == 0:
        return advantages, returns
    value = values[positions].double()
    reward = _rewards_on_actions(rewards, action_mask, sequence_ids, positions)
    owner = sequence_ids[positions]
    last = torch.ones_like(owner, dtype=torch.bool)
    last[:-1] = owner[1:] != owner[:-1]
    after = 0.0 if bootstrap is None else bootstrap[positions].double()
    following = torch.where(last, after, value.roll(-1))
    discount = gamma[positions].double() if isinstance(gamma, Tensor) else gamma
    decay = discount * (lam[positions].double() if isinstance(lam, Tensor) else torch.full_like(value, lam))
    result = _discounted_suffix_sums(reward + discount * following - value, torch.where(last, 0.0, decay))
    advantages[positions] = result.to(values.dtype)
    returns[positions] = (result + value).to(values.dtype)
    return advantages, returns


_FEW = 32


def _discounted_suffix_sums(delta: Tensor, decay: Tensor) -> Tensor:
    """x_t = delta_t + decay_t x_{t+1}, 0 after the end; a decay of 0 ends a sequence.

    The n tokens are cut into about sqrt(n) chunks that are walked backwards side by side; what flows into a chunk from
    the next one is the same recursion over the chunks' first tokens, and is added last.
    """
    size = delta.numel()
    steps = size if size <= _FEW else math.isqrt(size - 1) + 1
    chunks = -(-size // steps)
    padding = (0, chunks * steps - size)
    total, factor = (
        torch.nn.functional.pad(part, padding).view(chunks, steps).t().contiguous() for part in (delta, decay)
    )
    sums, products = total.unbind(0), factor.unbind(0)
    for step in range(steps - 2, -1, -1):
        sums[step].addcmul_(products[step], sums[step + 1])
    if chunks > 1:
        for step in range(steps - 2, -1, -1):
            products[step].mul_(products[step + 1])
        heads = _discounted_suffix_sums(total[0], factor[0])
        total.addcmul_(factor, torch.cat([heads[1:], heads.new_zeros(1)]))
    return total.t().reshape(-1)[:size]


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
