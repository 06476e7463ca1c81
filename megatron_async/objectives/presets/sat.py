"""SAT (arXiv 2607.18722): min-clip whose ends contract for the tokens that moved furthest from μ.

d = sg[log r] per token, or with level "sequence" the mean over the sequence's active tokens. q is the inverse-CDF
quantile of |d| over the active tokens of the global batch, which weighs a sequence by its length.
ψ(u) = 1/(1+(u/q)²); a token with |d| > q > 0 has the end on d's own side, whatever the sign of Â, drawn in by ψ(|d|).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.objectives.batch import Gather
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.min_clip import MinClip
from megatron_async.objectives.preset import preset
from megatron_async.objectives.quantile import inverse_cdf_quantile


@preset("sat")
class Sat(MinClip):
    equation = "min(r Â, clip(r, 1-ε_low c₋, 1+ε_high c₊) Â)"
    surrogate = "min-clip with contracted ends"

    @property
    def batch_statistics(self) -> bool:
        return self.choice("quantile_scope") == "batch"

    @property
    def whole_sequences(self) -> bool:
        return self._on_sequences

    @property
    def _on_sequences(self) -> bool:
        return self.choice("level") == "sequence"

    def _log_ratio(self, tokens: Tokens) -> Tensor:
        return tokens.sequence_mean(tokens.log_total) if self._on_sequences else tokens.log_total

    def statistic(self, tokens: Tokens, gather: Gather) -> dict[str, Tensor]:
        level = self.number("quantile")
        if self._on_sequences:
            lengths = gather(tokens.sequence_totals(tokens.active))
            values = gather((tokens.sequence_totals(tokens.log_total) / tokens.lengths).abs())
            held = lengths > 0
            return {"q": inverse_cdf_quantile(values[held], level, lengths[held])}
        return {"q": inverse_cdf_quantile(gather(tokens.log_total[tokens.active].abs()), level)}

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        log_ratio, q = self._log_ratio(tokens), statistic["q"].to(tokens.logprobs.dtype)
        gated = (log_ratio.abs() > q).logical_and_(q > 0)
        contraction = (log_ratio / q).square_().add_(1.0).reciprocal_()
        contraction = torch.where(gated, contraction, 1.0)
        # c contracts the end on d's own side. Using it for both ends gives the same S: a ratio above 1 never meets
        # the lower end, nor one below 1 the upper.
        low = 1.0 - self.epsilons[0] * contraction
        high = 1.0 + self.epsilons[1] * contraction
        diagnostics = {
            "q": q,
            "gated": gated,
            "contraction": contraction,
            "epsilons": torch.tensor(self.epsilons, dtype=torch.float64, device=q.device),
        }
        return self.clip(
            tokens, log_ratio, (low, high), sequence_level=self._on_sequences, diagnostics=diagnostics
        )
