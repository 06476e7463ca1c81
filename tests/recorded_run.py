"""A run's folder whose bank already holds every batch: what trains on it is the same, whenever it is interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_async.bank import Bank
from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan
from tests.engine_batches import VOCAB

GROUPS, GROUP_SIZE = 2, 2


def make_trajectory(random: np.random.Generator, number: int, version: int = 0) -> Trajectory:
    """A prompt and one turn; rewards within a group differ."""
    trajectory = Trajectory(
        f"t{number}", f"g{number // GROUP_SIZE}", f"p{number // GROUP_SIZE}", SamplingParams(), {}
    )
    trajectory.append_context(random.integers(0, VOCAB, 5).tolist())
    count = int(random.integers(4, 12))
    logprobs = (-np.log(VOCAB) + 0.1 * random.normal(size=count)).tolist()
    spans = [VersionSpan(version, 0, count)]
    trajectory.append_action(random.integers(0, VOCAB, count).tolist(), logprobs, spans, finish_reason="stop")
    trajectory.finish(Status.OK, float(number % GROUP_SIZE), {})
    return trajectory


def record_run(folder: Path, model: Path, steps: int, **changes: Any) -> Path:
    """Write the configuration and fill the bank with `steps` batches; returns the configuration's path."""
    config: dict[str, Any] = {
        "name": folder.name,
        "run_dir": str(folder.parent),
        "steps": steps,
        "model": {"path": str(model), "dtype": "float32"},
        "trainer": {"micro_batch_tokens": 64, "deadline_s": 60},
        "optimizer": {"lr": 1e-3, "lr_warmup_steps": 4, "lr_decay": "linear", "lr_decay_steps": 40},
        "batch": {"groups": GROUPS, "group_size": GROUP_SIZE},
        # The recorded log-probs are no engine's: nothing may be masked for it, so that every step is an update.
        "objective": {"mask_low": 0.0, "mask_high": float("inf")},
        "rollout": {"max_staleness": 1000, "max_tokens": 64, "max_new_tokens": 32},
        "observe": {"progress": "off", "tensorboard": False},
        "checkpoint": {"every": 3},
        **changes,
    }
    for part in (folder, folder / "status", folder / "logs"):
        part.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    random = np.random.default_rng(5)
    with Bank.open(f"sqlite:///{folder / 'bank.sqlite'}") as bank:
        for number in range(steps * GROUPS * GROUP_SIZE):
            trajectory = make_trajectory(random, number)
            bank.start_trajectory(trajectory_start(trajectory))
            bank.finish_trajectory(trajectory)
    return folder / "config.yaml"


def trajectory_start(trajectory: Trajectory) -> Trajectory:
    """The same trajectory before its first token."""
    return Trajectory(
        trajectory.trajectory_id, trajectory.group_id, trajectory.prompt_id, trajectory.sampling, trajectory.task
    )
