"""IcePop: weight r_d inside a wide window of r_d, nothing outside, min-clip on r_s.

The ratio enters once as the detached weight; multiplying by it again would give r² (field bug 19).
"""

from __future__ import annotations

from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("icepop")
class IcePop(Preset):
    equation = "r_d · 1{α ≤ r_d ≤ β} · min(r_s Â, clip(r_s) Â)"
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
