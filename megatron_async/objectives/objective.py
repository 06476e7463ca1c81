"""An objective: a preset on the kernel, with KL penalty, entropy bonus, aggregation and metrics.

Invariants: the loss of a micro-batch is its part of the globally normalised loss; adding the parts over micro-batches
and ranks gives the loss of the batch, whatever the cut. A micro-batch without an active token has loss 0, gradient 0
and no NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async.config.errors import ConfigError
from megatron_async.config.methods import ANCHORS, resolve_objective
from megatron_async.config.schema import ObjectiveConfig
from megatron_async.objectives import proxies, statistics
from megatron_async.objectives.batch import Gather, LossOutput, Normaliser, TokenBatch
from megatron_async.objectives.kernel import (
    Attach,
    Terms,
    Tokens,
    coefficients,
    kl_penalty,
    weighted_loss,
)
from megatron_async.objectives.min_clip import MinClip
from megatron_async.objectives.preset import PRESETS, Preset

STATISTICS = "statistics"
# Anchors the loss makes from log μ and log π_θ; `start` too, where the training forward's own values are the anchor.
DERIVED_ANCHORS = frozenset({"rollout", "linear", "loglinear", "start"})


class EmptyBatch(ValueError):
    """No token of the global batch may enter the loss; the caller skips the optimiser step and reports the message.

    stats: as of `LossOutput`, of the tokens that `Objective.prepare` was given.
    """

    def __init__(self, message: str, stats: dict[str, Tensor]) -> None:
        super().__init__(message)
        self.stats = stats


@dataclass(frozen=True, slots=True)
class BatchState:
    """What the global batch decides before the loss: a preset's scalars and, without rejected tokens in it, N."""

    statistic: dict[str, Tensor]
    normaliser: Normaliser | None = None


def _alone(values: Tensor) -> Tensor:
    return values


class Objective:
    """The loss of `config`, as pure tensor functions on packed tokens.

    needs: what the caller has to supply: "anchor" (anchor_logprobs), "reference" (reference_logprobs), "entropy",
    "rewards", "batch_statistics" (call `prepare` with log-probs at the start of the update and pass its state),
    "whole_sequences" (with context parallel, `TokenBatch.context` must be given).
    """

    def __init__(self, config: ObjectiveConfig, preset: Preset) -> None:
        self.config = config
        self.preset = preset
        self.anchor = ANCHORS[config.anchor]
        self.needs = self._needs()

    def _needs(self) -> frozenset[str]:
        needs = set(self.preset.needs)
        if self.config.anchor not in DERIVED_ANCHORS:
            needs.add("anchor")
        if self.config.kl_coefficient != 0.0:
            needs.add("reference")
        if self.config.entropy_coefficient != 0.0:
            needs.add("entropy")
        if self.preset.batch_statistics or not self.config.rejected_in_denominator:
            needs.add("batch_statistics")
        if self.preset.whole_sequences or self.config.aggregation == "sequence_mean_token_mean":
            needs.add("whole_sequences")
        return frozenset(needs)

    def _anchor(self, batch: TokenBatch, logprobs: Tensor) -> Tensor:
        """log π_old, [T]: scored by the caller, μ, or interpolated with the *current* policy."""
        name = self.config.anchor
        if name == "rollout":
            return batch.rollout_logprobs
        if name == "linear":
            return proxies.linear_proxy(batch.rollout_logprobs, logprobs, batch.version_gap)
        if name == "loglinear":
            return proxies.loglinear_proxy(batch.rollout_logprobs, logprobs, batch.version_gap)
        if batch.anchor_logprobs is not None:
            return batch.anchor_logprobs
        if name == "start":
            return logprobs
        raise ValueError(
            f"objective {self.config.name!r} has anchor {name!r}, but TokenBatch.anchor_logprobs is None; "
            f"score the batch with old_logits.source {name!r}, or set objective.anchor to one that needs no scoring"
        )

    def _tokens(self, batch: TokenBatch, logprobs: Tensor) -> Tokens:
        detached = logprobs.detach()
        if detached.dtype in (torch.bfloat16, torch.float16):
            detached = detached.float()
        return Tokens(detached, self._anchor(batch, detached), batch)

    @torch.no_grad()
    def prepare(self, batch: TokenBatch, logprobs_at_start: Tensor, gather: Gather) -> BatchState:
        """Statistics of the global batch, from this rank's whole share of it.

        logprobs_at_start: log π_θ before the first update on this batch, [T] as in `batch`. gather: concatenates 1-D
        tensors over data-parallel ranks; every rank must call `prepare`. Raises EmptyBatch when no token is accepted
        and rejected ones do not count in the denominator.
        """
        tokens = self._tokens(batch, logprobs_at_start)
        statistic = self.preset.statistic(tokens, gather)
        if self.config.rejected_in_denominator:
            return BatchState(statistic)
        mask = self.preset.terms(tokens, statistic).mask
        accepted = tokens.active if mask is None else tokens.active & mask
        held = tokens.segments.total(accepted) > 0
        counts = gather(torch.stack([accepted.sum(), held.sum()])).view(-1, 2).sum(dim=0).tolist()
        if counts[0] == 0:
            terms = self.preset.terms(tokens, statistic)
            stats = {STATISTICS: statistics.measure(tokens, terms, self._exact(batch))}
            raise EmptyBatch(self._empty_message(int(gather(tokens.action.sum().reshape(1)).sum())), stats)
        return BatchState(statistic, Normaliser(tokens=int(counts[0]), sequences=int(counts[1])))

    def _empty_message(self, action_tokens: int) -> str:
        return (
            f"objective {self.config.name!r} accepts none of the batch's {action_tokens} action tokens "
            f"(mask [{self.config.mask_low}, {self.config.mask_high}], anchor {self.config.anchor!r}): "
            "no optimiser step is made. Widen objective.mask_low/mask_high, use an exact anchor, or lower "
            "rollout.max_staleness"
        )

    def loss(
        self,
        logprobs: Tensor,
        batch: TokenBatch,
        normaliser: Normaliser,
        entropy: Tensor | None = None,
        state: BatchState | None = None,
        *,
        metrics: bool = True,
    ) -> LossOutput:
        """The micro-batch's part of the loss.

        logprobs: log π_θ with gradient, [T]. normaliser: counts of the global batch. entropy: [T] with gradient, read
        when `entropy_coefficient` is not 0. state: from `prepare`, required when `needs` has "batch_statistics".
        Raises ValueError naming what is missing.
        """
        self._check_inputs(batch, entropy, state)
        with torch.no_grad():
            tokens = self._tokens(batch, logprobs)
            statistic = state.statistic if state else self.preset.statistic(tokens, _alone)
            terms = self.preset.terms(tokens, statistic)
            exact = self._exact(batch)
            stats = {STATISTICS: statistics.measure(tokens, terms, exact)} if metrics else {}
            counted, used = self._denominator(tokens, terms, normaliser, state)
            coefficient = coefficients(tokens, self.config.aggregation, used, counted)
            value, gradient = weighted_loss(tokens, terms, coefficient)
            value, gradient = self._with_kl(tokens, coefficient, value, gradient)
        loss = Attach.apply(logprobs, value, gradient.to(logprobs.dtype))
        if self.config.entropy_coefficient != 0.0 and entropy is not None:
            bonus = torch.where(tokens.active, entropy, 0.0) * coefficient
            loss = loss - self.config.entropy_coefficient * bonus.sum()
        return LossOutput(loss, stats)

    def _check_inputs(self, batch: TokenBatch, entropy: Tensor | None, state: BatchState | None) -> None:
        missing = []
        if "batch_statistics" in self.needs and state is None:
            missing.append("the state of Objective.prepare")
        if "reference" in self.needs and batch.reference_logprobs is None:
            missing.append("TokenBatch.reference_logprobs (kl_coefficient is not 0)")
        if "entropy" in self.needs and entropy is None:
            missing.append("entropy (entropy_coefficient is not 0)")
        if missing:
            raise ValueError(f"objective {self.config.name!r} needs {' and '.join(missing)}")

    def _denominator(
        self, tokens: Tokens, terms: Terms, normaliser: Normaliser, state: BatchState | None
    ) -> tuple[Tensor, Normaliser]:
        """Tokens that count in a sequence's mean, and the counts of the batch."""
        if self.config.rejected_in_denominator:
            return tokens.action, normaliser
        assert state is not None and state.normaliser is not None, "prepare counts the accepted tokens"
        accepted = tokens.active if terms.mask is None else tokens.active & terms.mask
        return accepted, state.normaliser

    def _with_kl(
        self, tokens: Tokens, coefficient: Tensor | float, value: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor]:
        reference = tokens.batch.reference_logprobs
        if self.config.kl_coefficient == 0.0 or reference is None:
            return value, gradient
        difference = (tokens.logprobs - reference).masked_fill_(tokens.inactive, 0.0)
        penalty, slope = kl_penalty(self.config.kl_estimator, difference)
        scale = self.config.kl_coefficient * coefficient
        return value + (penalty * scale).sum(), gradient + (slope * scale).masked_fill_(tokens.inactive, 0.0)

    def _exact(self, batch: TokenBatch) -> Tensor:
        """Whether each token's anchor was computed under its own version; `start` is exact for gap 0."""
        if batch.anchor_exact is not None:
            return batch.anchor_exact.bool()
        if self.anchor.exact:
            return torch.ones_like(batch.action_mask, dtype=torch.bool)
        if self.config.anchor == "start":
            return batch.version_gap == 0
        return torch.zeros_like(batch.action_mask, dtype=torch.bool)

    def summarise(self, stats: dict[str, Tensor]) -> dict[str, float]:
        """Named metrics of the step from the summed `LossOutput.stats`; see docs/metrics.md."""
        return statistics.summarise(stats[STATISTICS]) if STATISTICS in stats else {}


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective that `config` names, null and "auto" fields filled in.

    Raises ConfigError for an illegal value, naming the legal ones.
    """
    resolved = resolve_objective(config)
    preset = PRESETS[resolved.name](resolved)
    if resolved.dual_clip is not None and not isinstance(preset, MinClip):
        raise ConfigError([f"objective.dual_clip: {resolved.name} has no min-clip; leave dual_clip null"])
    if resolved.dual_clip is not None and resolved.dual_clip <= 1.0:
        raise ConfigError([f"objective.dual_clip: {resolved.dual_clip} is not above 1 (3 is usual)"])
    return Objective(resolved, preset)
