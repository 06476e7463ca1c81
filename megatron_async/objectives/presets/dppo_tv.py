"""DPPO-TV: the trust region is |π-μ| ≤ δ in probability, and only for updates that lead out of it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("dppo_tv")
class DppoTv(Preset):
    equation = "sg[r] · 1{Â(r-1) ≤ 0 or |π-μ| ≤ δ} · Â·log π"
    surrogate = "Â·log π"
    mask_text = "Â(r-1) ≤ 0 or |π-μ| ≤ δ"

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        surrogate = surrogates.log_policy(tokens.logprobs, tokens.advantages)
        ratio = torch.exp(tokens.log_total)
        rollout = torch.exp(tokens.rollout)
        near = rollout.mul_(ratio - 1.0).abs_() <= self.number("delta")  # |π-μ| = μ|r-1|
        returning = tokens.advantages * tokens.log_total <= 0  # same sign as Â(r-1)
        return Terms(surrogate.value, surrogate.slope, weight=ratio, mask=near.logical_or_(returning))
