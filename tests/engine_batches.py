"""Batches for engine tests, without transformers: ranks import this, and start fast."""

from __future__ import annotations

import numpy as np
import torch

from megatron_async.config.schema import OptimizerConfig
from megatron_async.engine.passes import LossFn
from megatron_async.engine.sequences import Packed, Sequence

VOCAB = 96
ENTROPY_WEIGHT = 0.1
# A large epsilon keeps Adam smooth where a gradient is near 0: without it rounding decides the sign of the step.
OPTIMIZER = OptimizerConfig(
    lr=2e-2, adam_eps=1e-2, adam_beta2=0.95, weight_decay=0.0, clip_grad=0.5, lr_warmup_steps=2
)
LRS = (1e-2, 2e-2, 2e-2)
"""Learning rates of the first steps under OPTIMIZER's schedule."""


def make_sequences(seed: int = 3, lengths: tuple[int, ...] = (19, 7, 30, 12, 1, 25, 9)) -> list[Sequence]:
    """Sequences of uneven length and temperature with a random weight per token."""
    random = np.random.default_rng(seed)
    return [
        Sequence(
            random.integers(0, VOCAB, n).astype(np.int32),
            temperature=float(random.choice([0.7, 1.0, 1.3])),
            arrays={"advantages": random.normal(size=n).astype(np.float32)},
        )
        for n in lengths
    ]


def step_batches() -> list[list[Sequence]]:
    """One batch per step."""
    return [make_sequences(seed) for seed in range(len(LRS))]


def weighted_loss(num_tokens: int) -> LossFn:
    """−(1/N) Σ (advantage·log-prob + 0.1·entropy), with the global N given."""

    def loss_fn(
        packed: Packed, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        terms = packed.arrays["advantages"] * logprobs + ENTROPY_WEIGHT * entropy
        return -terms.sum() / num_tokens, {"tokens": torch.tensor(float(len(packed))), "terms": terms.sum()}

    return loss_fn
