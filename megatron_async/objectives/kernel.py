"""The loss kernel: L = -(1/N) Σ_t m_t · sg[w_t] · S(ratio_t, Â_t), four independent inputs.

Invariants:
- Presets work on detached values and return S together with its slope ∂S/∂log π. `Attach` hands that slope to autograd,
  so a placeholder (NaN, -inf) at a masked token can reach neither the loss nor the gradient: it is replaced before any
  exponential, and the rejected positions of both results are filled with 0, never multiplied by it.
- The denominator is that of the global batch. Nothing divides again, so the gradient does not depend on how the batch
  is cut into micro-batches or over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_async.objectives.batch import Normaliser, TokenBatch
from megatron_async.objectives.segments import Segments

# exp(20) = 5e8: beyond it a ratio is garbage, and exp would overflow float32 at 88.
LOG_RATIO_LIMIT = 20.0


class Tokens:
    """The detached view of a micro-batch that presets compute on; every tensor is [T].

    logprobs: log π_θ. rollout: log μ. anchor: log π_old. advantages: Â. action: tokens the policy wrote.
    active: action tokens whose μ and anchor are known. Log ratios are 0 off `active`.
    """

    def __init__(self, logprobs: Tensor, anchor: Tensor, batch: TokenBatch) -> None:
        self.logprobs = logprobs
        self.rollout = batch.rollout_logprobs
        self.anchor = anchor
        self.advantages = batch.advantages
        self.batch = batch
        self.action = batch.action_mask.bool()
        self._raw_discrepancy = None if anchor is self.rollout else anchor - self.rollout
        known = self.rollout if self._raw_discrepancy is None else self._raw_discrepancy
        self.active = (known.abs() < torch.inf).logical_and_(self.action)
        self.inactive = ~self.active
        self._lengths: Tensor | None = None

    def _clean(self, difference: Tensor) -> Tensor:
        return difference.masked_fill_(self.inactive, 0.0).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def _difference(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        return self._clean(numerator - denominator)

    @cached_property
    def log_discrepancy(self) -> Tensor:
        """log r_d = log π_old - log μ: engine noise, if the anchor is exact."""
        return (
            torch.zeros_like(self.rollout)
            if self._raw_discrepancy is None
            else self._clean(self._raw_discrepancy)
        )

    @cached_property
    def discrepancy_ratio(self) -> Tensor:
        """r_d = π_old/μ."""
        return torch.exp(self.log_discrepancy)

    @cached_property
    def log_staleness(self) -> Tensor:
        """log r_s = log π_θ - log π_old."""
        return self.log_total if self.anchor is self.rollout else self._difference(self.logprobs, self.anchor)

    @cached_property
    def log_total(self) -> Tensor:
        """log r = log π_θ - log μ."""
        return self._difference(self.logprobs, self.rollout)

    @cached_property
    def segments(self) -> Segments:
        return Segments.of(self.batch.sequence_ids)

    @property
    def lengths(self) -> Tensor:
        """Float64 [sequences]: active tokens of each sequence, at least 1 to divide by."""
        # not a cached_property: before Python 3.12 those hold a lock, and this one may wait for other ranks
        if self._lengths is None:
            self._lengths = self.sequence_totals(self.active).clamp_(min=1.0)
        return self._lengths

    def sequence_totals(self, values: Tensor) -> Tensor:
        """Float64 [sequences]: sum of `values` over each sequence, the shares of other context ranks included."""
        totals, context = self.segments.total(values), self.batch.context
        if context is None:
            return totals
        everywhere = torch.zeros(context.sequences, dtype=torch.float64, device=totals.device)
        everywhere.index_add_(0, self.segments.ids, totals)
        return context.all_reduce(everywhere).index_select(0, self.segments.ids)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[T]: mean of `values` over the active tokens of each token's sequence. `values` must be 0 off `active`."""
        return self.segments.spread(self.sequence_totals(values) / self.lengths, values.dtype)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[T]: sum of `values` over each token's sequence. `values` must be 0 off `active`."""
        return self.segments.spread(self.sequence_totals(values), values.dtype)


@dataclass(slots=True)
class Terms:
    """What a preset returns, all [T] and detached; ownership passes to the kernel, which may write into them.

    value: S. slope: ∂S/∂log π of the token, or with `sequence_level` ∂S/∂(mean log ratio of the sequence).
    weight: w, None = 1. mask: accepted tokens, None = all. clipped: tokens whose slope a clip has zeroed.
    log_ratio: the surrogate's log ratio, whose sign tells the upper from the lower clip.
    diagnostics: sums over tokens, by name.
    """

    value: Tensor
    slope: Tensor
    weight: Tensor | None = None
    mask: Tensor | None = None
    clipped: Tensor | None = None
    log_ratio: Tensor | None = None
    sequence_level: bool = False
    diagnostics: dict[str, Tensor] = field(default_factory=dict)


class Attach(torch.autograd.Function):
    """A scalar loss whose gradient with respect to the log-probs is already known."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None


def coefficients(tokens: Tokens, aggregation: str, normaliser: Normaliser, counted: Tensor) -> Tensor | float:
    """The factor of each token's term in the loss: a number, or [T] where it differs between sequences.

    counted: bool [T], tokens that count in a sequence's own mean.
    """
    if aggregation == "token_mean":
        return 1.0 / max(normaliser.tokens, 1)
    per_sequence = 1.0 / max(normaliser.sequences, 1)
    if aggregation == "sequence_sum":
        return per_sequence
    lengths = tokens.sequence_totals(counted).clamp_(min=1.0)
    return tokens.segments.spread(per_sequence / lengths, tokens.logprobs.dtype)


def weighted_loss(tokens: Tokens, terms: Terms, coefficient: Tensor | float) -> tuple[Tensor, Tensor]:
    """The surrogate's loss (scalar) and its gradient with respect to the log-probs ([T])."""
    rejected = tokens.inactive if terms.mask is None else ~(terms.mask & tokens.active)
    value, slope = terms.value, terms.slope
    if terms.weight is not None:
        value, slope = value.mul_(terms.weight), slope.mul_(terms.weight)
    value.masked_fill_(rejected, 0.0)
    slope.masked_fill_(rejected, 0.0)
    if isinstance(coefficient, Tensor):
        value, slope = value.mul_(coefficient), slope.mul_(coefficient)
    if terms.sequence_level:
        # every token of the sequence moves the mean by 1/length, rejected ones included
        slope = tokens.sequence_mean(slope).masked_fill_(tokens.inactive, 0.0)
    scale = -1.0 if isinstance(coefficient, Tensor) else -coefficient
    return value.sum() * scale, slope.mul_(scale)


def kl_penalty(kind: str, difference: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate of KL(π‖ref) and its derivative with respect to log π, from difference = log π - log ref."""
    if kind == "k1":
        return difference, torch.ones_like(difference)
    if kind == "k2":
        return difference.square() / 2, difference
    excess = torch.expm1(-difference)
    return excess + difference, -excess
