"""Ratios of a whole sequence, and masks that drop one (MIS)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_async.objectives.kernel import LOG_RATIO_LIMIT, Tokens


def at_level(tokens: Tokens, log_ratio: Tensor, level: str) -> Tensor:
    """The log ratio per token, or its sum ("sequence") or mean ("geometric") over the token's sequence."""
    if level == "token":
        return log_ratio
    if level == "geometric":
        return tokens.sequence_mean(log_ratio)
    return tokens.sequence_sum(log_ratio).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def without_vetoed(tokens: Tokens, log_ratio: Tensor, threshold: float) -> Tensor | None:
    """m = no token of the sequence has a ratio below `threshold` (0 = off); None when nothing is dropped."""
    if threshold <= 0.0:
        return None
    vetoes = log_ratio < math.log(threshold)  # log ratios are 0 off the active tokens
    # ranks that share sequences must sum alike, so only a rank that holds whole sequences may stop here
    if tokens.batch.context is None and not bool(vetoes.any()):
        return None
    return tokens.segments.spread(tokens.sequence_totals(vetoes), torch.float32) == 0


def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Conjunction of two optional masks."""
    if first is None or second is None:
        return first if second is None else second
    return first.logical_and_(second)
