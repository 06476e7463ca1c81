"""Interpolated proximal policies and what they amount to on the total ratio (Proposition 1 of arXiv 2605.12070).

α = 1/(n+1) is the weight on the *behaviour* policy μ for a token n versions old. (A-3PO writes α for the current
policy.) At n = 0, α is 1 and the proxy is μ itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def behaviour_weight(version_gap: Tensor, dtype: torch.dtype) -> Tensor:
    """α = 1/(n+1), [T]. Padding may hold a negative gap; it counts as 0."""
    return 1.0 / (version_gap.clamp(min=0).to(dtype) + 1.0)


def loglinear_proxy(rollout_logprobs: Tensor, logprobs: Tensor, version_gap: Tensor) -> Tensor:
    """log π_prox = α log μ + (1-α) log π_θ, [T]."""
    alpha = behaviour_weight(version_gap, logprobs.dtype)
    return torch.lerp(logprobs, rollout_logprobs, alpha)


def linear_proxy(rollout_logprobs: Tensor, logprobs: Tensor, version_gap: Tensor) -> Tensor:
    """log π_prox of π_prox = α μ + (1-α) π_θ, [T].

    Written on log μ + log(α + (1-α) r), so that only the ratio r = π_θ/μ is exponentiated.
    """
    alpha = behaviour_weight(version_gap, logprobs.dtype)
    return rollout_logprobs + torch.log1p((1.0 - alpha) * torch.expm1(logprobs - rollout_logprobs))


@dataclass(frozen=True, slots=True)
class TotalRatioBounds:
    """Windows of the total ratio r = π_θ/μ that equal a proxy's mask on r_d and clip on r_s."""

    mask_low: float
    mask_high: float
    clip_low: float
    clip_high: float


def reparameterise(
    kind: str, version_gap: int, mask: tuple[float, float], clip: tuple[float, float]
) -> TotalRatioBounds:
    """Closed form of Proposition 1.

    kind: "linear" or "loglinear". mask: window of r_d as ratios. clip: (1-ε_low, 1+ε_high) as ratios of r_s; the upper
    end acts for Â ≥ 0, the lower for Â < 0. An end that no ratio reaches is 0 or infinity. At gap 0 the proxy is μ:
    r_d is 1 and no ratio is masked.
    """
    alpha = 1.0 / (version_gap + 1)
    rest = 1.0 - alpha
    if kind == "loglinear":
        low, high = (0.0, math.inf) if rest == 0 else (mask[0] ** (1 / rest), mask[1] ** (1 / rest))
        return TotalRatioBounds(low, high, clip[0] ** (1 / alpha), clip[1] ** (1 / alpha))
    if kind != "linear":
        raise ValueError(f"kind is {kind!r}; it must be 'linear' or 'loglinear'")
    low, high = (0.0, math.inf) if rest == 0 else (1 - (1 - mask[0]) / rest, 1 + (mask[1] - 1) / rest)
    return TotalRatioBounds(low, high, _linear_clip(alpha, clip[0]), _linear_clip(alpha, clip[1]))


def _linear_clip(alpha: float, bound: float) -> float:
    """r at which r/(α + (1-α) r) reaches `bound`; the left side stays below 1/(1-α)."""
    rest = 1.0 - (1.0 - alpha) * bound
    return alpha * bound / rest if rest > 0 else math.inf
