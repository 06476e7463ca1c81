"""PPO: min-clip on π_θ/anchor, neither weight nor mask by default.

Coupled with anchor μ, recomputed with anchor π_async.
ε_high > ε_low is DAPO's clip-higher.
"""

from __future__ import annotations

from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("ppo")
class Ppo(Preset):
    equation = "min(r_s Â, clip(r_s, 1-ε_low, 1+ε_high) Â)"
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
