"""What methods with a min-clip share: min(ratio·Â, clip(ratio)·Â), by default on r_s with weight and mask on r_d."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_async.objectives import surrogates
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.preset import Preset

Ends = tuple[float | Tensor, float | Tensor]


class MinClip(Preset):
    """The whole of PPO, decoupled PPO, TIS and IcePop, which differ in anchor, weight, mask and thresholds."""

    surrogate = "min-clip"

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        return self.clip(tokens, tokens.log_staleness, weight=self.weight(tokens), mask=self.mask(tokens))

    def clip(self, tokens: Tokens, log_ratio: Tensor, ends: Ends | None = None, **inputs: Any) -> Terms:
        """The min-clip on exp(log_ratio), [T], between `ends` or the configured. inputs: more fields of `Terms`."""
        low, high = ends or self.clip_ends
        surrogate = surrogates.min_clip(log_ratio, tokens.advantages, low, high, self.dual)
        return Terms(
            surrogate.value, surrogate.slope, clipped=surrogate.clipped, log_ratio=log_ratio, **inputs
        )
