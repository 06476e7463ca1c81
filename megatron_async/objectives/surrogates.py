"""Surrogates S(ratio, Â) with their slopes ∂S/∂log ratio, on detached tensors of one shape.

Each returns fresh tensors, so that the kernel may write into them. The slope of a ratio with respect to log π is the
ratio itself, hence it appears once in value and slope alike: never squared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Bound = float | Tensor


@dataclass(slots=True)
class Surrogate:
    """value: S. slope: ∂S/∂log ratio. clipped: where a clip holds the value constant, None = nowhere."""

    value: Tensor
    slope: Tensor
    clipped: Tensor | None = None


def log_policy(logprobs: Tensor, advantages: Tensor) -> Surrogate:
    """Â · log π: the plain policy gradient, for weights that carry the ratio themselves."""
    return Surrogate(advantages * logprobs, advantages.clone())


def min_clip(
    log_ratio: Tensor, advantages: Tensor, low: Bound, high: Bound, dual: float | None = None
) -> Surrogate:
    """min(r Â, clip(r, low, high) Â); with `dual`, max(that, dual · Â) where Â < 0.

    low, high: ends of the clip as ratios, numbers or [T]. A token counts as clipped when its gradient is zeroed:
    r > high for Â ≥ 0, r < low for Â < 0 (the MIS form of arXiv 2605.12070), or r > dual for Â < 0.
    """
    ratio = torch.exp(log_ratio)
    positive = advantages >= 0
    clipped = torch.where(positive, ratio > high, ratio < low)
    bounded = ratio.clamp(low, high)  # type: ignore[arg-type]
    if dual is not None:
        past_dual = ratio > dual
        past_dual &= ~positive
        bounded.masked_fill_(past_dual, dual)
        clipped |= past_dual
    slope = ratio.mul_(advantages)
    value = torch.where(clipped, bounded.mul_(advantages), slope)
    return Surrogate(value, slope.masked_fill_(clipped, 0.0), clipped)


def quadratic(log_ratio: Tensor, advantages: Tensor, scale: Tensor | float) -> Surrogate:
    """r Â - |Â| scale (r-1)²/2: the slope vanishes where scale (r-1) = sign Â."""
    ratio = torch.exp(log_ratio)
    excess = ratio - 1.0
    penalty = advantages.abs().mul_(scale).mul_(excess)
    slope = (advantages - penalty).mul_(ratio)
    value = ratio.mul_(advantages).sub_(penalty.mul_(excess).mul_(0.5))
    return Surrogate(value, slope)
