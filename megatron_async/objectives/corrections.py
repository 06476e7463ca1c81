"""Weights w and masks m made of the discrepancy ratio r_d = π_old/μ, at token or sequence level."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_async.objectives.kernel import LOG_RATIO_LIMIT, Tokens


def weight(kind: str, log_discrepancy: Tensor, cap: float) -> Tensor | None:
    """w by name (`config.methods.WEIGHTS`): 1 (None), r_d, or min(r_d, cap)."""
    if kind == "none":
        return None
    ratio = torch.exp(log_discrepancy)
    return ratio.clamp_(max=cap) if kind == "truncated" else ratio


def window(log_ratio: Tensor, ends: tuple[float, float]) -> Tensor:
    """m = low ≤ ratio ≤ high, ends included."""
    ratio = torch.exp(log_ratio)
    return (ratio >= ends[0]).logical_and_(ratio <= ends[1])


def at_level(tokens: Tokens, log_ratio: Tensor, level: str) -> Tensor:
    """The log ratio per token, or its sum ("sequence") or mean ("geometric") over the token's sequence."""
    if level == "token":
        return log_ratio
    if level == "geometric":
        return tokens.sequence_mean(log_ratio)
    return tokens.sequence_sum(log_ratio).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def without_vetoed(tokens: Tokens, log_ratio: Tensor, threshold: float) -> Tensor | None:
    """m = no token of the sequence has a ratio below `threshold`; None when the veto is off (threshold 0)."""
    if threshold <= 0.0:
        return None
    vetoes = (log_ratio < math.log(threshold)).logical_and_(tokens.active)
    return tokens.segments.total(vetoes)[tokens.segments.index] == 0


def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Conjunction of two optional masks."""
    if first is None or second is None:
        return first if second is None else second
    return first.logical_and_(second)
