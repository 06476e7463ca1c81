"""REINFORCE: S = Â·log π, no ratio at all. Unbiased only for tokens of the current version."""

from __future__ import annotations

from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("reinforce")
class Reinforce(Preset):
    equation = "Â·log π"
    surrogate = "Â·log π"

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        surrogate = surrogates.log_policy(tokens.logprobs, tokens.advantages)
        return Terms(surrogate.value, surrogate.slope)
