"""Runs on every rank: one critic per layout; values, gradients and what training moved are compared on rank 0.

usage: critic_ranks.py DIRECTORY LAYOUT…   with LAYOUT as in engine_ranks.py
DIRECTORY holds, for each kind of model, what tests.critic_reference.write_reference wrote; findings.json goes there.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_async.config.schema import CriticConfig, LayoutConfig, ModelConfig, TrainerConfig
from megatron_async.engine import checkpoint, platform
from megatron_async.engine.critic import Critic
from megatron_async.engine.hf_export import ExportPlan
from tests.critic_batches import CRITIC_OPTIMIZER, UPDATES, squared_error
from tests.distributed.engine_ranks import parse_layout, per_expert, worst_relative
from tests.engine_batches import make_sequences


def build(
    directory: Path, layout: LayoutConfig, critic: CriticConfig, *, distributed: bool, lr: float
) -> Critic:
    trainer = TrainerConfig(use_distributed_optimizer=distributed, micro_batch_tokens=48)
    model = ModelConfig(path=str(directory / "critic"), dtype="float32")
    return Critic.build(model, layout, trainer, replace(CRITIC_OPTIMIZER, lr=lr), critic=critic)


def inspect_values(directory: Path, layout: LayoutConfig) -> dict[str, Any]:
    """Values, loss and gradients of one layout against transformers'."""
    critic = build(directory, layout, CriticConfig(freeze="none"), distributed=False, lr=0.0)
    sequences = make_sequences()
    values = critic.values(sequences)
    result = critic.train_step(sequences, squared_error(sum(map(len, sequences))))
    pieces = critic.pieces(lambda parameter: parameter.main_grad)
    gradients = {
        name: tensor.clone()
        for name, tensor in ExportPlan(critic.table, pieces).stream()
        if tensor is not None
    }
    if dist.get_rank() != 0:
        return {}
    reference = per_expert(load_file(directory / "reference.safetensors"))
    expected = {name[5:]: value for name, value in reference.items() if name.startswith("grad.")}
    worst, name = worst_relative(gradients, expected)
    return {
        "value_error": float(np.abs(np.concatenate(values.before) - reference["before"].numpy()).max()),
        "after_error": float(np.abs(values.after - reference["after"].numpy()).max()),
        "loss_error": abs(result.loss - reference["loss"].item()),
        "gradient_error": worst,
        "gradient_tensor": name,
        "gradients_compared": len(gradients),
    }


def inspect_freezing(directory: Path, layout: LayoutConfig) -> dict[str, Any]:
    """Which tensors moved in a few updates with the distributed optimiser, and what the optimiser holds."""
    critic = build(directory, layout, CriticConfig(freeze="attention"), distributed=True, lr=1e-2)
    before = {name: tensor.clone() for name, tensor in critic.export() if tensor is not None}
    sequences = make_sequences()
    results = [critic.train_step(sequences, squared_error(sum(map(len, sequences)))) for _ in range(UPDATES)]
    after = {name: tensor.clone() for name, tensor in critic.export() if tensor is not None}
    optimizer, buffers = critic.optimizer, [buffer for chunk in critic.chunks for buffer in chunk.buffers]
    assert optimizer is not None
    owned = sum(master.numel() for master in critic.masters())
    held = torch.tensor([owned, _trainable(critic, layout)], dtype=torch.float64)
    dist.all_reduce(held)
    buffered = {
        name for buffer in buffers for parameter in buffer.params for name in _names(critic, parameter)
    }
    return {
        "moved": sorted(name for name, tensor in before.items() if not torch.equal(tensor, after[name])),
        "kept": sorted(name for name, tensor in before.items() if torch.equal(tensor, after[name])),
        "masters": held[0].item(),
        "trainable": held[1].item(),
        "frozen_in_buffers": sorted(name for name in buffered if "self_attention" in name),
        "losses": [results[0].loss, results[-1].loss],
    }


def _trainable(critic: Critic, layout: LayoutConfig) -> float:
    """This rank's trainable elements, shared equally among the ranks that hold the same."""
    total = 0.0
    for name, parameter in critic.named_parameters():
        expert = critic.table.rows_of(name)[0].is_expert
        replicas = layout.expert_data_parallel_size if expert else _dense_replicas(layout)
        total += parameter.numel() / replicas if parameter.requires_grad else 0.0
    return total


def _dense_replicas(layout: LayoutConfig) -> int:
    return layout.data_parallel_size * layout.context_parallel_size


def _names(critic: Critic, parameter: torch.Tensor) -> list[str]:
    return [name for name, own in critic.named_parameters() if own is parameter]


def inspect_saving(directory: Path, layout: LayoutConfig) -> dict[str, Any]:
    """A critic from the language model starts at 0; saved and loaded again it gives the same bits."""
    trainer = TrainerConfig(micro_batch_tokens=48)
    fresh = Critic.build(
        ModelConfig(path=str(directory / "model"), dtype="float32"),
        layout,
        trainer,
        None,
        critic=CriticConfig(),
    )
    started = float(max(np.abs(value).max() for value in fresh.values(make_sequences()).before))
    trained = build(directory, layout, CriticConfig(), distributed=True, lr=1e-2)
    sequences = make_sequences()
    trained.train_step(sequences, squared_error(sum(map(len, sequences))))
    trained.save_hf(directory / "saved")
    fresh.load_hf(directory / "saved")
    own, other = trained.values(sequences), fresh.values(sequences)
    return {
        "fresh": started,
        "saved_equal": bool(
            np.array_equal(np.concatenate(own.before), np.concatenate(other.before))
            and np.array_equal(own.after, other.after)
        ),
    }


def inspect_resuming(directory: Path, layout: LayoutConfig) -> dict[str, Any]:
    """A critic saved after two updates and loaded into another goes on bit for bit."""
    own, other = (
        build(directory, layout, CriticConfig(freeze="attention"), distributed=True, lr=1e-2)
        for _ in range(2)
    )
    sequences = make_sequences()
    loss = squared_error(sum(map(len, sequences)))
    for _ in range(2):
        own.train_step(sequences, loss)
    folder = (
        directory / f"generation_{layout.tensor_model_parallel_size}_{layout.pipeline_model_parallel_size}"
    )
    folder /= f"{layout.context_parallel_size}_{layout.expert_model_parallel_size}"
    checkpoint.ShardedWriter(asynchronous=False).begin(own, folder, lambda: None)
    checkpoint.load(other, folder, num_steps=2)
    ends = []
    for critic in (own, other):
        critic.train_step(sequences, loss)
        ends.append({name: tensor.clone() for name, tensor in critic.export() if tensor is not None})
    return {"resumed_differs": [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])]}


def main() -> None:
    directory = Path(sys.argv[1])
    findings = {}
    for text in sys.argv[2:]:
        kind, layout = parse_layout(text, int(os.environ["WORLD_SIZE"]))
        findings[text] = (
            inspect_values(directory / kind, layout)
            | inspect_freezing(directory / kind, layout)
            | inspect_saving(directory / kind, layout)
            | inspect_resuming(directory / kind, layout)
        )
    if dist.get_rank() == 0:
        (directory / "findings.json").write_text(json.dumps(findings, indent=1))
    platform.shutdown()


if __name__ == "__main__":
    main()
