"""Truncated importance sampling: weight min(r_d, C), no mask by default, min-clip on r_s."""

from __future__ import annotations

from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("tis")
class Tis(Preset):
    equation = "min(r_d, C) · min(r_s Â, clip(r_s) Â)"
    surrogate = "min-clip"

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        log_ratio = tokens.log_staleness
        surrogate = surrogates.min_clip(log_ratio, tokens.advantages, *self.clip_ends, self.dual)
        return Terms(
            surrogate.value,
            surrogate.slope,
            weight=self.weight(tokens),
            mask=self.mask(tokens),
            clipped=surrogate.clipped,
            log_ratio=log_ratio,
        )
