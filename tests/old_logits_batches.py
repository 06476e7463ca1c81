"""Batches with versions, and optimiser steps that move the weights, for tests of old log-probs."""

from __future__ import annotations

import numpy as np
import torch

from megatron_async.config.schema import OptimizerConfig
from megatron_async.engine.passes import LossFn
from megatron_async.engine.sequences import Packed, Sequence
from tests.engine_batches import VOCAB

# Steps large enough that every version has other log-probs, small enough that most bits of a bf16 weight stay.
OPTIMIZER = OptimizerConfig(lr=1e-3, adam_beta2=0.95, clip_grad=1.0)
LENGTHS = (23, 9, 31, 14, 5, 18)


def versioned_sequences(versions: range, current: int, seed: int = 5) -> list[Sequence]:
    """A prompt, then stretches of action tokens of rising versions with a context token between them.

    Sequences differ in which versions they hold; the last stretch of sequence 2 was sampled over older KV.
    """
    random = np.random.default_rng(seed)
    return [_sequence(random, n, i, versions, current) for i, n in enumerate(LENGTHS)]


def _sequence(random: np.random.Generator, length: int, i: int, versions: range, current: int) -> Sequence:
    held = sorted(random.choice(list(versions), size=min(1 + i % 3, len(versions)), replace=False).tolist())
    token_versions = np.full(length, -1)
    cuts = np.linspace(2, length, len(held) + 1).astype(int)
    for version, start, end in zip(held, cuts[:-1], cuts[1:], strict=True):
        token_versions[start : end - 1] = version
    mask = token_versions >= 0
    flagged = np.zeros(length, bool)
    if i == 2:
        flagged[cuts[-2] : cuts[-1]] = mask[cuts[-2] : cuts[-1]]
    return Sequence(
        random.integers(0, VOCAB, length).astype(np.int32),
        temperature=float(random.choice([0.7, 1.0])),
        arrays={
            "action_mask": mask,
            "version_gap": np.where(mask, current - token_versions, 0).astype(np.int64),
            "kv_mismatch": flagged,
            "advantages": random.normal(size=length).astype(np.float32),
        },
    )


def policy_gradient(sequences: list[Sequence]) -> LossFn:
    """Plain policy gradient over the action tokens."""
    count = sum(int(sequence.arrays["action_mask"].sum()) for sequence in sequences)

    def loss_fn(
        packed: Packed, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        kept = torch.where(packed.arrays["action_mask"], packed.arrays["advantages"] * logprobs, 0.0)
        return -kept.sum() / count, {}

    return loss_fn
