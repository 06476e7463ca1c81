"""SPO: r_s Â - |Â|(r_s-1)²/(2ε); the pull back grows smoothly and the optimum lies at the clip's end 1 ± ε."""

from __future__ import annotations

from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("spo")
class Spo(Preset):
    equation = "r_s Â - |Â| (r_s-1)²/(2ε)"
    surrogate = "quadratic"

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        scale = 1.0 / self.number("epsilon")
        surrogate = surrogates.quadratic(tokens.log_staleness, tokens.advantages, scale)
        return Terms(surrogate.value, surrogate.slope, mask=self.mask(tokens))
