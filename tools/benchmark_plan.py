"""The plan against what is there: [plan_parameters_*], [plan_unmapped_tensors_*], [plan_rss_error], [plan_rss_slack].

The first two build every distinct rank of the published models on the meta device and count. The others train two steps
of a model of about 100 M parameters in float32 in processes of their own, and compare the estimate (weights, gradients,
optimiser, activations) with the growth of resident memory over a warmed-up start, at its highest:

- plan_rss_error: how far the estimate is from the growth where freed blocks go back to the system at once, so that
  resident memory is what is in use;
- plan_rss_slack: what glibc's allocator, left as it is, keeps on top, as a share of that growth.

    python -m tools.benchmark_plan --write
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from megatron_async.config import from_dict
from megatron_async.config.estimate import bytes_text
from megatron_async.config.hf import read_shape
from megatron_async.config.plan import trainer_budget
from megatron_async.config.schema import OptimizerConfig, RunConfig
from megatron_async.engine import platform
from megatron_async.planning import survey
from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint
from tools.benchmark_rows import ROOT, Row, write_rows

TOKENS = 4096
RETURNING = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc settings under which blocks above 64 KiB are mapped one by one and unmapped when freed."""
SHAPE = TinyShape(
    hidden=512, layers=8, heads=8, key_value_heads=2, head_dim=64, experts=16, expert_hidden=512
)
LAYOUTS: dict[str, dict[str, int]] = {
    "qwen3_4b": {"world_size": 8, "tensor_model_parallel_size": 2},
    "qwen3_30b_a3b": {
        "world_size": 16,
        "tensor_model_parallel_size": 4,
        "expert_model_parallel_size": 8,
    },
    "qwen3_235b_a22b": {
        "world_size": 128,
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 16,
    },
}


def counted(name: str) -> list[Row]:
    """Elements held by the ranks, and tensors that are not covered exactly once."""
    layout = LAYOUTS[name]
    config = from_dict(
        {
            "name": "plan",
            "model": {"path": str(ROOT / "recipes" / "models" / name)},
            "layout": layout,
            "batch": {"groups": 128},
        }
    )
    result = survey(config)
    print(result.text())
    words = ", ".join(f"{key} {value}" for key, value in layout.items())
    conditions = (
        f"{len(result.shares)} distinct of {result.world_size} ranks built on the meta device; {words}"
    )
    short = name.removeprefix("qwen3_").split("_")[0]
    return [
        Row(f"plan_parameters_{short}", result.elements, "parameters", "", conditions),
        Row(f"plan_unmapped_tensors_{short}", len(result.problems), "tensors", "<= 0", conditions),
    ]


class PeakMemory:
    """Highest resident memory of this process while `watching`, sampled every 5 ms."""

    def __init__(self) -> None:
        self.peak = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample until the block ends."""
        done, process = threading.Event(), psutil.Process()

        def sample() -> None:
            while not done.wait(0.005):
                self.peak = max(self.peak, process.memory_info().rss)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def train(config: RunConfig, tokens: int, steps: int) -> Any:
    """A policy after some optimiser steps on four sequences that fill one micro-batch."""
    from megatron_async.engine.policy import Policy
    from megatron_async.engine.sequences import Sequence

    policy = Policy.build(config.model, config.layout, config.trainer, OptimizerConfig())
    vocabulary = policy.hf_config.vocab_size
    sequences = [Sequence(np.arange(tokens // 4, dtype=np.int32) % vocabulary) for _ in range(4)]
    for _ in range(steps):
        policy.train_step(sequences, lambda packed, logprobs, entropy: (logprobs.sum() / tokens, {}))
    return policy


def run_config(path: Path, tokens: int) -> RunConfig:
    """One rank, float32."""
    return from_dict(
        {
            "name": "memory",
            "model": {"path": str(path), "dtype": "float32"},
            "trainer": {"micro_batch_tokens": tokens},
        }
    )


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes: what the plan says, and by how much resident memory grew. parameters: of the model."""

    estimate: float
    grown: int
    parameters: int


def measure() -> Growth:
    """In this process."""
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        write_tiny_checkpoint(small, 0, TinyShape())
        parameters = write_tiny_checkpoint(large, 0, SHAPE)
        train(run_config(small, 1024), 1024, steps=1)  # imports, thread pools, lazily made tables
        platform.shutdown()
        gc.collect()
        config, before, memory = run_config(large, TOKENS), psutil.Process().memory_info().rss, PeakMemory()
        with memory.watching():
            train(config, TOKENS, steps=2)
        platform.shutdown()
        shape = read_shape(large)
        assert shape is not None
        needs = dict(trainer_budget(shape, config, 0).needs)
    # Publishing is not part of a step.
    estimate = sum(size for name, size in needs.items() if name != "publishing")
    return Growth(estimate, memory.peak - before, parameters)


def measured_in(environment: dict[str, str]) -> Growth:
    """In a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.benchmark_plan", "--measure"],
        env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Growth(**json.loads(done.stdout.splitlines()[-1]))


def measured_memory() -> list[Row]:
    """Estimate against growth, and what the allocator keeps."""
    found, usual = measured_in(RETURNING), measured_in({})
    setting = (
        f"estimate {bytes_text(found.estimate)}; Qwen3-MoE of {found.parameters / 1e6:.0f} M parameters, float32, one "
        f"rank, {TOKENS} tokens, two steps"
    )
    variables = " ".join(f"{name}={value}" for name, value in RETURNING.items())
    return [
        Row(
            "plan_rss_error",
            abs(found.estimate / found.grown - 1.0),
            "",
            "<= 0.1",
            f"resident memory grew by {bytes_text(found.grown)} at most, {variables}; {setting}",
        ),
        Row(
            "plan_rss_slack",
            usual.grown / found.grown - 1.0,
            "",
            "",
            f"it grew by {bytes_text(usual.grown)} with glibc's allocator as it is; {setting}",
        ),
    ]


def main() -> int:
    """Measure, print, and with --write keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/plan.json")
    parser.add_argument("--memory-only", action="store_true", help="leave the published models out")
    parser.add_argument("--measure", action="store_true", help="only this process's growth, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asdict(measure())))
        return 0
    rows = measured_memory()
    for name in () if options.memory_only else LAYOUTS:
        rows += counted(name)
    for row in rows:
        print(row.figure, row.value, row.unit)
    if options.write:
        write_rows("plan", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
