"""GSPO: min-clip on the sequence ratio s = exp(mean_t log r_s), the mean over the sequence's active tokens only."""

from __future__ import annotations

from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("gspo")
class Gspo(Preset):
    equation = "min(s Â, clip(s, 1-ε_low, 1+ε_high) Â), s = exp(mean_t log r_s)"
    surrogate = "min-clip on the sequence"

    @property
    def whole_sequences(self) -> bool:
        return True

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        log_ratio = tokens.sequence_mean(tokens.log_staleness)
        surrogate = surrogates.min_clip(log_ratio, tokens.advantages, *self.clip_ends, self.dual)
        return Terms(
            surrogate.value,
            surrogate.slope,
            weight=self.weight(tokens),
            mask=self.mask(tokens),
            clipped=surrogate.clipped,
            log_ratio=log_ratio,
            sequence_level=True,
        )
