"""TOPR: positive rewards are imitated whatever their age; the others get the tapered weight clip(r, 0, 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("topr")
class Topr(Preset):
    needs = frozenset({"rewards"})
    equation = "sg[1 if reward > 0 else clip(r_s, 0, 1)] · Â·log π"
    surrogate = "Â·log π"
    weight_text = "1 if reward > 0, else min(r_s, 1)"

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        if tokens.batch.rewards is None:
            raise ValueError("topr weighs tokens by the sign of their reward: TokenBatch.rewards is None")
        surrogate = surrogates.log_policy(tokens.logprobs, tokens.advantages)
        weight = torch.exp(tokens.log_staleness).clamp_(max=1.0).masked_fill_(tokens.batch.rewards > 0, 1.0)
        return Terms(surrogate.value, surrogate.slope, weight=weight, mask=self.mask(tokens))
