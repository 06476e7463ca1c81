"""Runs on every rank: one update with each objective that looks at whole sequences, data parallel and context parallel.

usage: objective_ranks.py DIRECTORY
DIRECTORY/model is a checkpoint; findings.json goes there. With data parallel a sequence lies on one rank, with context
parallel each rank holds a share of each; both must give the same loss, gradient and metrics.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_async.config.schema import LayoutConfig, ModelConfig, TrainerConfig
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.objectives import Objective
from megatron_async.old_logits import AnchorLogprobs
from megatron_async.training.loss import global_counts, policy_loss, train_in_parts
from tests.distributed.engine_ranks import whole_gradients
from tests.engine_batches import OPTIMIZER, VOCAB
from tests.numerics.objective_batches import SEQUENCE_WIDE, objective

BUDGET = 32
# Tokens of a micro-batch on all ranks together. The last sequence does not fit beside another one: context-parallel
# rank 1 then has a micro-batch in which it holds none of its only token.
LENGTHS = (32, 29, 31, 30, 1)


@dataclass(frozen=True)
class Update:
    """What one update reported, and its whole gradients on rank 0."""

    loss: float
    gradients: dict[str, torch.Tensor]
    metrics: dict[str, float]


def build(directory: Path, context_parallel: int) -> Policy:
    """A policy on all ranks that learns nothing (rate 0), with gradients that can be read."""
    layout = LayoutConfig(world_size=int(os.environ["WORLD_SIZE"]), context_parallel_size=context_parallel)
    trainer = TrainerConfig(use_distributed_optimizer=False, micro_batch_tokens=BUDGET // context_parallel)
    model = ModelConfig(path=str(directory / "model"), dtype="float32")
    return Policy.build(model, layout, trainer, replace(OPTIMIZER, clip_grad=0.0, lr=0.0))


def make_batch(policy: Policy) -> list[Sequence]:
    """Sequences whose rollout log-probs lie about the policy's; the one-token sequence is all prompt."""
    random = np.random.default_rng(7)
    bare = [Sequence(random.integers(0, VOCAB, length).astype(np.int32)) for length in LENGTHS]
    logprobs = policy.logprobs(bare)

    def arrays(own: np.ndarray) -> dict[str, np.ndarray]:
        length = len(own)
        mask = random.random(length) > 0.3
        mask[0] = False
        return {
            "action_mask": mask,
            "rollout_logprobs": (own + random.normal(0, 0.1, length)).astype(np.float32),
            "advantages": random.normal(size=length).astype(np.float32),
            "rewards": np.ones(length, np.float32),
            "update_gap": random.integers(0, 3, length),
        }

    return [replace(s, arrays=arrays(own)) for s, own in zip(bare, logprobs, strict=True)]


def anchors(policy: Policy, batch: list[Sequence]) -> AnchorLogprobs:
    """An anchor that is neither the policy's nor the rollout's."""
    noise = np.random.default_rng(8)
    rollout = [s.arrays["rollout_logprobs"] for s in batch]
    values = [(own + noise.normal(0, 0.05, len(own))).astype(np.float32) for own in rollout]
    return AnchorLogprobs("exact", values=values, start=policy.logprobs(batch))


def update(policy: Policy, of: Objective, batch: list[Sequence]) -> Update:
    scored = anchors(policy, batch)
    (result,) = train_in_parts(policy, of, batch, scored, parts=1)
    stats = {name: torch.as_tensor(value) for name, value in result.stats.items()}
    return Update(result.loss, whole_gradients(policy), of.summarise(stats))


def gradient_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest |Δ| over all tensors, relative to the largest entry of the expected gradients."""
    scale = max(tensor.abs().max().item() for tensor in expected.values())
    return max((found[name] - expected[name]).abs().max().item() for name in expected) / scale


def without_sums(policy: Policy, of: Objective, batch: list[Sequence]) -> dict[str, torch.Tensor]:
    """Gradients where each rank takes its share for the whole sequence: what the sums over shares are there for."""
    scored = anchors(policy, batch)
    arrays = [
        replace(s, arrays={**s.arrays, "anchor_logprobs": value})
        for s, value in zip(batch, scored.values or [], strict=True)
    ]
    policy.train_step(arrays, policy_loss(of, global_counts(arrays)))
    return whole_gradients(policy)


def main() -> None:
    directory = Path(sys.argv[1])
    cases = [objective(name, **config) for name, config in SEQUENCE_WIDE]
    whole = build(directory, context_parallel=1)
    batch = make_batch(whole)
    expected = [update(whole, of, batch) for of in cases]
    shared = build(directory, context_parallel=dist.get_world_size())
    found = [update(shared, of, batch) for of in cases]
    naive = without_sums(shared, cases[0], batch)
    if dist.get_rank() == 0:
        findings: list[dict[str, Any]] = [
            {
                "loss": own.loss,
                "loss_error": abs(own.loss - other.loss),
                "gradient_error": gradient_error(own.gradients, other.gradients),
                "metrics": own.metrics,
                "expected_metrics": other.metrics,
            }
            for own, other in zip(found, expected, strict=True)
        ]
        report = {"cases": findings, "naive_error": gradient_error(naive, expected[0].gradients)}
        (directory / "findings.json").write_text(json.dumps(report, indent=1))
    platform.shutdown()


if __name__ == "__main__":
    main()
