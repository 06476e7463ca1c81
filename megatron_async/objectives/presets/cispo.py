"""CISPO: the clipped ratio is a detached weight on Â·log π, so no token ever loses its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("cispo")
class Cispo(Preset):
    equation = "sg[clip(r_s, 1-ε_low, 1+ε_high)] · Â·log π"
    surrogate = "Â·log π"

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        surrogate = surrogates.log_policy(tokens.logprobs, tokens.advantages)
        low, high = self.clip_ends
        weight = torch.exp(tokens.log_staleness).clamp_(low, high)
        return Terms(surrogate.value, surrogate.slope, weight=weight, mask=self.mask(tokens))
