"""Order statistics over the global batch: SAT's weighted quantile and M2PO's truncation."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_cdf_quantile(values: Tensor, level: float, weights: Tensor | None = None) -> Tensor:
    """Smallest value v with P(X ≤ v) ≥ level, without interpolation; a scalar tensor, 0 for no values.

    values, weights: [K], finite, weights ≥ 0. Without weights every value counts once. At most a share of `1 - level`
    of the weight lies strictly above the result.
    """
    if values.numel() == 0:
        return values.new_zeros(())
    if weights is None:
        # ceil(level K), with the rounding error of level * K kept from raising it by one
        rank = int(-((-level * values.numel() + 1e-9) // 1))
        return values.kthvalue(min(max(rank, 1), values.numel())).values
    ordered, order = torch.sort(values)
    cumulative = torch.cumsum(weights[order].double(), dim=0)
    target = level * cumulative[-1] * (1.0 - 1e-12)
    index = torch.searchsorted(cumulative, target.reshape(1)).clamp(max=values.numel() - 1)
    return ordered[index].squeeze(0)


def truncation_for_second_moment(magnitudes: Tensor, bound: float) -> Tensor:
    """Largest τ with mean(min(x, τ)²) ≤ bound over the magnitudes x ≥ 0, [K]; infinity when no truncation is needed.

    A scalar float64 tensor. Exact: the mean is piecewise quadratic in τ with breaks at the sorted magnitudes.
    """
    infinity = magnitudes.new_full((), torch.inf, dtype=torch.float64)
    if magnitudes.numel() == 0:
        return infinity
    ordered = torch.sort(magnitudes.double()).values
    squares = ordered.square()
    below = torch.cumsum(squares, dim=0) - squares
    remaining = torch.arange(ordered.numel(), 0, -1, device=ordered.device, dtype=torch.float64)
    budget = bound * ordered.numel()
    exceeds = below + squares * remaining > budget
    if not bool(exceeds.any()):
        return infinity
    first = int(exceeds.to(torch.int8).argmax())
    return ((budget - below[first]) / remaining[first]).clamp(min=0.0).sqrt()
