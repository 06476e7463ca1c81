"""Warm start: supervised learning on demonstrations, with the same engine that RL uses.

Runs under torchrun. The environment provides the demonstrations (token ids and action masks, made by its own chat
format), so the model learns exactly the format in which RL will sample. Every rank draws the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_async import training_record
from megatron_async.config.schema import RunConfig
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy, TrainStepResult
from megatron_async.engine.sequences import Sequence
from megatron_async.observe import MetricsWriter, RunFiles
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.environments import build_demonstrations
from megatron_async.training.loss import supervised_loss


def main(config: RunConfig) -> int:
    """Train `steps` steps of `batch` demonstrations, write a Hugging Face checkpoint; returns the exit code."""
    policy = Policy.build(config.model, config.layout, config.trainer, config.optimizer, config.seed)
    try:
        batches = _batches(_examples(config), config.batch.trajectories, config.seed)
        if dist.get_rank() == 0:
            with MetricsWriter(config.run_path, tensorboard=config.observe.tensorboard) as metrics:
                _train(policy, batches, config, metrics)
        else:
            _train(policy, batches, config, None)
        policy.save_hf(output_path(config))
        if dist.get_rank() == 0:
            training_record.begin_if_missing(config, training_record.WARM_START)
            training_record.carry(config.run_path, output_path(config))
    finally:
        platform.shutdown()
    return 0


def output_path(config: RunConfig) -> Path:
    """Where the warmed-up checkpoint goes: the `checkpoint` of the run's folder, as for any other training."""
    return RunFiles(config.run_path).checkpoint


def _train(
    policy: Policy, batches: Iterator[list[Sequence]], config: RunConfig, metrics: MetricsWriter | None
) -> None:
    for step in range(config.steps):
        sequences = next(batches)
        actions = int(sum(sequence.arrays["action_mask"].sum() for sequence in sequences))
        context = int(sum(sequence.arrays["context_mask"].sum() for sequence in sequences))
        loss = supervised_loss(actions, context, config.warm_start.context_weight)
        result = policy.train_step(sequences, loss)
        if metrics is not None:
            metrics.log(step, {"batch/tokens": sum(len(sequence) for sequence in sequences), **_row(result)})


def _row(result: TrainStepResult) -> dict[str, float]:
    stats = {name: float(value) for name, value in result.stats.items()}
    return {**stats, "loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}


def _examples(config: RunConfig) -> list[Sequence]:
    chat = ChatFormat(config.model.path, config.rollout.chat_template_options)
    pairs = build_demonstrations(config.environment, config.warm_start.demonstrations, config.seed, chat)
    return [_example(np.asarray(ids, np.int32), np.asarray(mask, bool)) for ids, mask in pairs]


def _example(token_ids: np.ndarray, action_mask: np.ndarray) -> Sequence:
    context_mask = ~action_mask
    context_mask[0] = False  # nothing predicts the first token
    return Sequence(token_ids, 1.0, {"action_mask": action_mask, "context_mask": context_mask})


def _batches(examples: list[Sequence], size: int, seed: int) -> Iterator[list[Sequence]]:
    """Endless shuffled batches of `size`."""
    assert len(examples) >= size, f"{len(examples)} demonstrations do not fill a batch of {size}"
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(len(examples))
        for start in range(0, len(order) - size + 1, size):
            yield [examples[i] for i in order[start : start + size]]
