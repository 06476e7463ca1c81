"""The loss of the critic tests, without transformers: ranks import this, and start fast."""

from __future__ import annotations

import torch

from megatron_async.config.schema import OptimizerConfig
from megatron_async.engine.passes import LossFn
from megatron_async.engine.sequences import Packed

CRITIC_OPTIMIZER = OptimizerConfig(lr=1e-2, adam_beta2=0.95, clip_grad=0.0)
UPDATES = 20


def squared_error(num_tokens: int) -> LossFn:
    """(1/N) Σ ½ (V_t − advantages_t)² over all tokens but each sequence's first; `advantages` stand for returns."""

    def loss_fn(packed: Packed, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        errors = torch.where(packed.positions > 0, values - packed.arrays["advantages"], 0.0)
        return 0.5 * errors.square().sum() / num_tokens, {"tokens": torch.tensor(float(len(packed)))}

    return loss_fn
