"""Masked importance sampling: weight and window on r_d per token, over the sequence, or as its geometric mean.

A sequence that holds one token with r_d below `veto` is dropped as a whole: such a token could hardly have been sampled
by the policy being trained, and what follows it was conditioned on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.objectives import corrections
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.min_clip import MinClip
from megatron_async.objectives.preset import preset


@preset("mis")
class Mis(MinClip):
    equation = "r_d^(level) · 1{low ≤ r_d^(level) ≤ high} · min(r_s Â, clip(r_s) Â)"
    mask_text = "low ≤ r_d ≤ high at the level; veto"

    @property
    def whole_sequences(self) -> bool:
        return self.choice("level") != "token" or self.number("veto") > 0.0

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        discrepancy = torch.exp(corrections.at_level(tokens, tokens.log_discrepancy, self.choice("level")))
        veto = corrections.without_vetoed(tokens, tokens.log_discrepancy, self.number("veto"))
        mask = corrections.both(self.mask_of(discrepancy), veto)
        return self.clip(tokens, tokens.log_staleness, weight=self.weight_of(discrepancy), mask=mask)
