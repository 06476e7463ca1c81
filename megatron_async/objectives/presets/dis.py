"""DIS, direct double-sided importance sampling (arXiv 2607.07508): sg[f(r)]·Â·log π, f(r) = r in the window, else 0.

r = π_θ/μ needs no second forward pass. The window is open, whatever the sign of Â; rejected tokens
stay in N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("dis")
class Dis(Preset):
    equation = "sg[r · 1{1-ε_low < r < 1+ε_high}] · Â·log π"
    surrogate = "Â·log π"
    mask_text = "1-ε_low < r < 1+ε_high"

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        surrogate = surrogates.log_policy(tokens.logprobs, tokens.advantages)
        ratio = torch.exp(tokens.log_total)
        low, high = self.clip_ends
        inside = (ratio > low).logical_and_(ratio < high)
        return Terms(surrogate.value, surrogate.slope, weight=ratio, mask=inside)
