"""Runs on every rank: train, checkpoint while training goes on, load under another layout, train on.

usage: checkpoint_ranks.py DIRECTORY JOB…   with JOB like save:NAME:moe:tp2 or load:NAME:moe:pp2
DIRECTORY/moe/model is the starting checkpoint; DIRECTORY/NAME/ gets the checkpoint and, from rank 0, what the weights
were when it was begun (saved.safetensors) and after the steps that followed (continued.safetensors). A load writes
findings-NAME-LAYOUT.json.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_async.config.schema import LayoutConfig, ModelConfig, TrainerConfig
from megatron_async.engine import checkpoint, platform
from megatron_async.engine.policy import Policy
from tests.distributed.engine_ranks import parse_layout, worst_relative
from tests.engine_batches import OPTIMIZER, make_sequences, weighted_loss

STEPS_BEFORE, STEPS_AFTER = 2, 3
# Weight decay and a schedule, so that neither a lost count nor a lost rate can hide.
SETTINGS = replace(OPTIMIZER, lr_warmup_steps=8, weight_decay=0.1)


def build(directory: Path, layout: LayoutConfig, *, dtype: str, distributed: bool) -> Policy:
    trainer = TrainerConfig(use_distributed_optimizer=distributed, micro_batch_tokens=48)
    model = ModelConfig(path=str(directory / "moe" / "model"), dtype=dtype)  # type: ignore[arg-type]
    return Policy.build(model, layout, trainer, SETTINGS)


def train(policy: Policy, first: int, count: int) -> None:
    for seed in range(first, first + count):
        sequences = make_sequences(seed)
        policy.train_step(sequences, weighted_loss(sum(map(len, sequences))))


def whole_weights(policy: Policy) -> dict[str, torch.Tensor]:
    """On rank 0."""
    return {name: tensor.clone() for name, tensor in policy.export() if tensor is not None}


def in_fp32(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in tensors.items()}


def make_average(policy: Policy) -> list[torch.Tensor]:
    return [master.detach() * 0.5 + 1.0 for master in policy.masters()]


def save(directory: Path, name: str, policy: Policy, *, asynchronous: bool = True) -> None:
    """A checkpoint after two steps; training goes on before its files are complete."""
    train(policy, 0, STEPS_BEFORE)
    saved, average = whole_weights(policy), make_average(policy)
    writer = checkpoint.ShardedWriter(asynchronous=asynchronous)
    done: list[bool] = []
    writer.begin(policy, directory / name / "weights", lambda: done.append(True), average)
    assert all(torch.equal(a, b) for a, b in zip(average, make_average(policy), strict=True)), "average changed"
    train(policy, STEPS_BEFORE, STEPS_AFTER)
    writer.finish()
    assert done == [True]
    if dist.get_rank() == 0:
        save_file(saved, directory / name / "saved.safetensors")
        save_file(whole_weights(policy), directory / name / "continued.safetensors")
    else:
        whole_weights(policy)


def load(directory: Path, name: str, policy: Policy) -> dict[str, Any]:
    """Differences to what was saved, and to what the saving run came to afterwards."""
    train(policy, 7, 1)  # so that nothing is right by being untouched
    average = [torch.full_like(value, 7.0) for value in policy.masters()]
    checkpoint.load(policy, directory / name / "weights", num_steps=STEPS_BEFORE)
    checkpoint.load_average(policy, directory / name / "weights", average)
    loaded = whole_weights(policy)
    wrong_average = sum(
        not torch.equal(a, b) for a, b in zip(average, make_average(policy), strict=True)
    )
    counts = step_counts(policy)
    train(policy, STEPS_BEFORE, STEPS_AFTER)
    continued = whole_weights(policy)
    if dist.get_rank() != 0:
        return {}
    saved, expected = (load_file(directory / name / f"{what}.safetensors") for what in ("saved", "continued"))
    worst, where = worst_relative(in_fp32(continued), in_fp32(expected))
    return {
        "loaded_differs": [key for key in saved if not torch.equal(saved[key], loaded[key])],
        "tensors": len(saved),
        "continued_differs": [key for key in expected if not torch.equal(expected[key], continued[key])],
        "continued_error": worst,
        "continued_tensor": where,
        "average_differs": wrong_average,
        "moved": any(not torch.equal(saved[key], expected[key]) for key in saved),
        **counts,
    }


def step_counts(policy: Policy) -> dict[str, Any]:
    """Adam's counts, and how many tensors hold them."""
    assert policy.optimizer is not None
    steps = [
        state["step"] for inner in policy.optimizer.inner_optimizers() for state in inner.optimizer.state.values()
    ]
    return {
        "counts": sorted({float(step) for step in steps}),
        "parameters": len(steps),
        "count_tensors": len({step.data_ptr() for step in steps}),
    }


def run(directory: Path, job: str) -> None:
    """One job of the command line: action:name:options:layout, with options like bf16+plain or -."""
    action, name, options, text = job.split(":", 3)
    _, layout = parse_layout(text, int(os.environ.get("WORLD_SIZE", "1")))
    policy = build(
        directory,
        layout,
        dtype="bfloat16" if "bf16" in options else "float32",
        distributed="plain" not in options,
    )
    if action == "save":
        save(directory, name, policy, asynchronous="sync" not in options)
        return
    found = load(directory, name, policy)
    if found:
        (directory / f"{name}-{options}-{text.replace(':', '_')}.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    directory = Path(sys.argv[1])
    for job in sys.argv[2:]:
        run(directory, job)
    platform.shutdown()


if __name__ == "__main__":
    main()
