"""What an objective reads and what it returns.

Invariants: every tensor is token-aligned (entry t speaks of token t) and flat over the packed tokens of one
micro-batch; a sequence lies in one micro-batch as a whole, on one rank or shared by the context-parallel ranks that
`TokenBatch.context` sums over; values off `action_mask` may be any placeholder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""Concatenates a 1-D tensor over the data-parallel ranks; the lengths may differ between ranks."""


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """Sums over the ranks that hold shares of the same sequences.

    sequences: ids of the batch are 0 .. sequences-1, the same on all these ranks. all_reduce: adds a float64 tensor
    [sequences] over the ranks and returns it; every rank calls it equally often.
    """

    sequences: int
    all_reduce: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The packed tokens of one micro-batch; every tensor is [T].

    rollout_logprobs: log μ, reported by the engine when it sampled the token.
    anchor_logprobs: log π_old from the configured anchor; NaN where the anchor has no value for a token (it is then
        rejected and counted). None lets the anchors that need no scoring derive it.
    advantages: Â, broadcast to tokens. action_mask: bool, tokens the policy wrote.
    sequence_ids: int64, equal for the tokens of one sequence; any values, any order.
    version_gap: int64, version at the start of this update minus the token's version.
    reference_logprobs: log-probs of the reference policy (KL penalty). rewards: the sequence's reward per token (TOPR).
    anchor_exact: bool, whether the anchor of this token is exact; None derives it from the anchor's name.
    age_seconds: seconds between the making of the token's version and this update.
    context: given when each rank holds a share of every sequence; None when sequences are whole.
    """

    rollout_logprobs: Tensor
    anchor_logprobs: Tensor | None
    advantages: Tensor
    action_mask: Tensor
    sequence_ids: Tensor
    version_gap: Tensor
    reference_logprobs: Tensor | None = None
    rewards: Tensor | None = None
    anchor_exact: Tensor | None = None
    age_seconds: Tensor | None = None
    context: ContextParallel | None = None


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Denominators of the *global* batch: action tokens, and sequences that have at least one action token."""

    tokens: int
    sequences: int

    @staticmethod
    def count(batch: TokenBatch, gather: Gather | None = None) -> Normaliser:
        """Count a rank's whole share, and add the other ranks' counts through `gather`."""
        active = batch.action_mask.bool()
        counts = torch.stack(
            [active.sum(), torch.unique(batch.sequence_ids[active]).numel() + 0 * active.sum()]
        )
        if gather is not None:
            counts = gather(counts).view(-1, 2).sum(dim=0)
        tokens, sequences = counts.tolist()
        return Normaliser(tokens=int(tokens), sequences=int(sequences))


@dataclass(frozen=True, slots=True)
class LossOutput:
    """loss: this micro-batch's part of the globally normalised loss (add over micro-batches and ranks).

    stats: sums for `Objective.summarise`; add them over micro-batches and data-parallel ranks.
    """

    loss: Tensor
    stats: dict[str, Tensor]
