"""M2PO: the clip's ends e^{±τ} follow from bounding the second moment of log r_s over harmful tokens.

Harmful: Â > 0 with r > 1, or Â < 0 with r < 1, the tokens whose update leads further away. τ is the largest with
mean(min(|log r|, τ)²) ≤ bound; the ends are never closer to 1 than the configured ε, and are open when the moment
meets the bound without truncation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.objectives.batch import Gather
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.min_clip import MinClip
from megatron_async.objectives.preset import preset
from megatron_async.objectives.quantile import truncation_for_second_moment


@preset("m2po")
class M2po(MinClip):
    equation = "min(r_s Â, clip(r_s, e^{-τ}, e^{τ}) Â)"
    surrogate = "min-clip with ends e^{±τ}"

    @property
    def batch_statistics(self) -> bool:
        return self.choice("moment_scope") == "batch"

    def statistic(self, tokens: Tokens, gather: Gather) -> dict[str, Tensor]:
        log_ratio = tokens.log_staleness
        harmful = (log_ratio * tokens.advantages > 0).logical_and_(tokens.active)
        return {
            "tau": truncation_for_second_moment(
                gather(log_ratio[harmful].abs()), self.number("second_moment")
            )
        }

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        log_ratio, tau = tokens.log_staleness, statistic["tau"].to(tokens.logprobs.dtype)
        low, high = self.clip_ends
        low_end, high_end = torch.exp(-tau).clamp(max=low), torch.exp(tau).clamp(min=high)
        return self.clip(tokens, log_ratio, (low_end, high_end), mask=self.mask(tokens))
