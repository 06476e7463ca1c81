"""Whitening of per-token advantages over the global batch.

Invariant: values off the mask never enter; one active token, or none, gives zeros, not a division by zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    reduce_sum: Callable[[Tensor], Tensor] | None = None,
    epsilon: float = 1e-8,
) -> Tensor:
    """(values - mean) / std over the tokens of `mask`, [T]; 0 off the mask.

    shift_mean: False puts the mean back. reduce_sum: adds a float64 [3] vector over data-parallel ranks. The standard
    deviation has n-1 under the root.
    """
    cleaned = torch.where(mask, values, 0.0).double()
    moments = torch.stack([mask.sum().double(), cleaned.sum(), cleaned.square().sum()])
    if reduce_sum is not None:
        moments = reduce_sum(moments)
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1.0)
    variance = (squares - count * mean.square()).clamp(min=0.0) / (count - 1.0).clamp(min=1.0)
    centred = torch.where(mask, cleaned - mean, 0.0)
    scaled = centred / (variance.sqrt() + epsilon)
    return (scaled if shift_mean else torch.where(mask, scaled + mean, 0.0)).to(values.dtype)
