"""What a checkpoint makes training wait for, saved asynchronously and synchronously, and what the disk takes a second.

    python -m tools.benchmark_checkpoint [--hidden 768] [--layers 8] [--folder DIR] [--no-rows]

One rank, bfloat16 weights with fp32 masters and moments. The stall of an asynchronous save is the time until training
may go on (plan and copy), and what writing to every optimiser state takes longer right afterwards. The memory that is
copied into was allocated before, as a run does at its start. The synchronous save waits for files that are synced.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from megatron_async.config.schema import LayoutConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megatron_async.engine import checkpoint, platform
from megatron_async.engine.hf_config import HFConfig
from megatron_async.engine.hf_weights import NameTable
from megatron_async.engine.policy import Policy
from tools.benchmark_rows import Row, write_rows

REPEATS = 3
VOCABULARY = 32_000


def build(folder: Path, hidden: int, layers: int) -> Policy:
    """A dense policy with random weights, and an optimiser whose states exist."""
    folder.mkdir()
    config = {
        "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "head_dim": 64,
        "intermediate_size": 4 * hidden, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rows = NameTable(HFConfig.from_pretrained(folder)).rows
    weights = {row.hf_name: torch.randn(row.shape).mul_(0.02).bfloat16() for row in rows}
    save_file(weights, folder / "model.safetensors")
    model = ModelConfig(path=str(folder), dtype="bfloat16")
    policy = Policy.build(model, LayoutConfig(), TrainerConfig(), OptimizerConfig())
    checkpoint.initialise_states(policy)
    return policy


def write_states(policy: Policy) -> float:
    """Seconds that a write to every master and moment takes."""
    assert policy.optimizer is not None
    started = time.perf_counter()
    for inner in policy.optimizer.inner_optimizers():
        for master, held in inner.optimizer.state.items():
            for tensor in (master, held["exp_avg"], held["exp_avg_sq"]):
                tensor.data.mul_(1.0)
    return time.perf_counter() - started


def save(policy: Policy, folder: Path, writer: checkpoint.ShardedWriter) -> tuple[float, int]:
    """Seconds that training waits, and bytes."""
    usual = write_states(policy)
    started = time.perf_counter()
    writer.begin(policy, folder, lambda: None)
    stall = time.perf_counter() - started
    stall += max(0.0, write_states(policy) - usual)
    writer.finish()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    shutil.rmtree(folder)
    return stall, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary folder)")
    parser.add_argument("--no-rows", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        policy = build(folder / "model", options.hidden, options.layers)
        aside, in_line = checkpoint.ShardedWriter(), checkpoint.ShardedWriter(asynchronous=False)
        started = time.perf_counter()
        aside.prepare(policy)
        preparing = time.perf_counter() - started
        background = [save(policy, folder / f"a{i}", aside) for i in range(REPEATS)]
        waiting = [save(policy, folder / f"s{i}", in_line) for i in range(REPEATS)]
        platform.shutdown()
    stall, synchronous = (float(np.median([run[0] for run in runs])) for runs in (background, waiting))
    size, millions = waiting[0][1], sum(p.numel() for p in policy.models[0].parameters()) / 1e6
    setting = f"{millions:.0f} M parameters, {size / 1e9:.2f} GB, one rank, one core, median of {REPEATS}"
    rows = [
        Row("save_stall_ratio", stall / synchronous, "", "<= 0.2", setting),
        Row("save_stall_seconds", stall, "s", "", setting),
        Row("save_synchronous_seconds", synchronous, "s", "", setting),
        Row("save_preparing_seconds", preparing, "s", "", f"{setting}; once, at a run's start"),
        Row("save_copied_gigabytes_per_second", size / 1e9 / stall, "GB/s", "", f"{setting}; the stall's"),
        Row("save_gigabytes_per_second", size / 1e9 / synchronous, "GB/s", "", f"{setting}; synchronous, synced"),
    ]
    for row in rows:
        print(f"{row.figure}: {row.value:.3f} {row.unit}  ({row.conditions})")
    if not options.no_rows:
        write_rows("megatron", rows)


if __name__ == "__main__":
    main()
