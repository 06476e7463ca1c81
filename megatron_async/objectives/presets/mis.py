"""Masked importance sampling: weight and window on r_d per token, over the sequence, or as its geometric mean.

A sequence that holds one token with r_d below `veto` is dropped as a whole: such a token could hardly have been sampled
by the policy being trained, and what follows it was conditioned on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.objectives import corrections, surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset, preset


@preset("mis")
class Mis(Preset):
    equation = "r_d^(level) · 1{low ≤ r_d^(level) ≤ high} · min(r_s Â, clip(r_s) Â)"
    surrogate = "min-clip"
    mask_text = "low ≤ r_d ≤ high at the level; veto"

    @property
    def whole_sequences(self) -> bool:
        return self.choice("level") != "token" or self.number("veto") > 0.0

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        log_ratio = tokens.log_staleness
        surrogate = surrogates.min_clip(log_ratio, tokens.advantages, *self.clip_ends, self.dual)
        discrepancy = torch.exp(corrections.at_level(tokens, tokens.log_discrepancy, self.choice("level")))
        veto = corrections.without_vetoed(tokens, tokens.log_discrepancy, self.number("veto"))
        return Terms(
            surrogate.value,
            surrogate.slope,
            weight=self.weight_of(discrepancy),
            mask=corrections.both(self.mask_of(discrepancy), veto),
            clipped=surrogate.clipped,
            log_ratio=log_ratio,
        )
