"""DRPO: r Â - |Â| μ (r-1)²/(2δ); SPO's penalty weighted by the anchor's probability (μ by default).

It bounds the change of the probability, |π-μ|, where SPO bounds the ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("drpo")
class Drpo(Preset):
    equation = "r Â - |Â| μ (r-1)²/(2δ)"
    surrogate = "quadratic, weighted by μ"

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        scale = torch.exp(tokens.anchor).mul_(1.0 / self.number("delta"))
        surrogate = surrogates.quadratic(tokens.log_staleness, tokens.advantages, scale)
        return Terms(surrogate.value, surrogate.slope, mask=self.mask(tokens))
