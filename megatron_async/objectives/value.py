"""The critic's regression loss, on the global batch's denominator.

With e = V − R: half e², or Huber's with its bend at δ. Value clipping (PPO) takes the larger of the loss at V and at
V_old + clip(V − V_old, ±c): a value that has moved by more than c towards its target stops pulling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async.config.schema import CriticConfig


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Sums over the masked tokens; `loss` is divided by the global number of action tokens."""

    loss: Tensor
    stats: dict[str, Tensor]


def value_loss(
    config: CriticConfig, values: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor, tokens: int
) -> ValueLoss:
    """Part of the globally normalised loss of the tokens given, [T] each.

    tokens: action tokens of the global batch. stats, detached: `clipped` (tokens whose clipped loss was the larger) and
    `squared_error` (Σ e²).
    """
    errors = torch.where(mask, values - returns, 0.0)
    losses, clipped = _regression(config, errors), torch.zeros_like(mask)
    if config.value_clip is not None:
        moved = (values - old_values).clamp(-config.value_clip, config.value_clip)
        bounded = _regression(config, torch.where(mask, old_values + moved - returns, 0.0))
        clipped = bounded > losses
        losses = torch.maximum(losses, bounded)
    stats = {"clipped": clipped.sum(), "squared_error": errors.detach().double().square().sum()}
    return ValueLoss(losses.sum() / max(tokens, 1), stats)


def _regression(config: CriticConfig, errors: Tensor) -> Tensor:
    if config.loss == "mse":
        return 0.5 * errors.square()
    size, bend = errors.abs(), config.huber_delta
    return torch.where(size <= bend, 0.5 * errors.square(), bend * (size - 0.5 * bend))
