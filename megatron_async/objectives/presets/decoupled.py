"""Decoupled PPO (A, formulas §3): weight and mask on r_d = π_old/μ, min-clip on r_s = π_θ/π_old.

With the default weight r_d the gradient is MIS·r·Â·∇log π, A's Eqs 1-4. With an exact anchor r_d is engine noise
alone; with `start`, `ewma` or an interpolated anchor version drift enters it and a tight mask rejects usable tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("decoupled")
class Decoupled(Preset):
    equation = "w · min(r_s Â, clip(r_s, 1-ε_low, 1+ε_high) Â), w = r_d"
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
