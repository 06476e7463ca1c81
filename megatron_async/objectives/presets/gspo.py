"""GSPO: min-clip on the sequence ratio s = exp(mean_t log r_s), the mean over the sequence's active tokens only."""

from __future__ import annotations

from torch import Tensor

from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.min_clip import MinClip
from megatron_async.objectives.preset import preset


@preset("gspo")
class Gspo(MinClip):
    equation = "min(s Â, clip(s, 1-ε_low, 1+ε_high) Â), s = exp(mean_t log r_s)"
    surrogate = "min-clip on the sequence"

    @property
    def whole_sequences(self) -> bool:
        return True

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        log_ratio = tokens.sequence_mean(tokens.log_staleness)
        weight, mask = self.weight(tokens), self.mask(tokens)
        return self.clip(tokens, log_ratio, weight=weight, mask=mask, sequence_level=True)
