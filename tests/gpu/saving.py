"""A save in the background while training goes on, on any device."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_async.config.schema import LayoutConfig, ModelConfig, TrainerConfig
from megatron_async.engine import checkpoint, platform
from megatron_async.engine.policy import Policy
from tests.distributed.engine_ranks import train_once
from tests.engine_batches import OPTIMIZER
from tests.engine_reference import make_model


def check_background_save(folder: Path) -> checkpoint.ShardedWriter:
    """Save, train on before the files are complete, load into another policy; the writer that saved."""
    make_model("moe").to(torch.bfloat16).save_pretrained(folder / "model")
    model, trainer = ModelConfig(path=str(folder / "model"), dtype="bfloat16"), TrainerConfig(micro_batch_tokens=64)
    policy, other = (Policy.build(model, LayoutConfig(), trainer, OPTIMIZER) for _ in range(2))
    writer = checkpoint.ShardedWriter()
    train_once(policy)
    saved = [master.detach().clone() for master in policy.masters()]
    writer.begin(policy, folder / "weights", lambda: None)
    train_once(policy)
    writer.finish()
    assert not all(torch.equal(a, b) for a, b in zip(saved, policy.masters(), strict=True)), "training moved nothing"
    checkpoint.load(other, folder / "weights", num_steps=1)
    assert all(torch.equal(a, b) for a, b in zip(saved, other.masters(), strict=True))
    platform.shutdown()
    return writer
