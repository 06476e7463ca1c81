"""Trainers on recorded batches, with a critic on their ranks or on ranks of its own, as processes."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.distributed.launch import REPOSITORY, start_world
from tests.recorded_run import record_run

TRAINER = REPOSITORY / "tests" / "faults" / "trainer_worker.py"
DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True)
class Job:
    """A run's folder and what runs in it. critic: its own ranks, 0 where it shares the trainer's."""

    config: Path
    ranks: int
    critic: int

    @property
    def folder(self) -> Path:
        return self.config.parent

    def start(self) -> list[subprocess.Popen[bytes]]:
        """The trainer, and the critic where it has ranks of its own."""
        trainer = start_world([str(TRAINER), str(self.config)], self.ranks, self._log_file("trainer"))
        return [trainer, self.start_critic()] if self.critic else [trainer]

    def start_critic(self) -> subprocess.Popen[bytes]:
        """The critic's ranks alone."""
        arguments = ["-m", "megatron_async", "critic", "--config", str(self.config)]
        return start_world(arguments, self.critic, self._log_file("critic"))

    def log(self, part: str) -> str:
        return self._log_file(part).read_text(errors="replace")

    def _log_file(self, part: str) -> Path:
        return self.folder / "logs" / f"{part}.log"

    def run(self) -> None:
        """To the end, which every part reaches by itself."""
        processes = self.start()
        try:
            codes = [process.wait(timeout=DEADLINE_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert codes == [0] * len(processes), "\n".join(
            self.log(part)[-3000:] for part in ("trainer", "critic")[: len(processes)]
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """Of policy and critic, as they were saved at the end."""
        found = {f"policy.{k}": v for k, v in load_file(self.folder / "checkpoint" / "model.safetensors").items()}
        return found | {f"critic.{k}": v for k, v in load_file(self.folder / "critic" / "model.safetensors").items()}


def make_job(
    folder: Path, model: Path, steps: int, *, ranks: int = 1, own: dict[str, Any] | None = None, **critic: Any
) -> Job:
    """own: the critic's own layout ({}: the actor's); None where it shares the actor's ranks."""
    layout = {"world_size": ranks, "expert_model_parallel_size": ranks}
    critic = {"lr": 3e-3, "warmup_steps": 1, "updates": 2, **critic}
    if own is not None:
        critic |= {"ranks": "own", "layout": own or None}
    config = record_run(
        folder,
        model,
        steps,
        layout=layout,
        trainer={"micro_batch_tokens": 64, "deadline_s": 700},  # processes of a loaded machine start at different times
        advantage={"name": "gae", "drop_zero_variance_groups": False},
        critic=critic,
    )
    return Job(config, ranks, 0 if own is None else own.get("world_size", ranks))


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors whose bits differ."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
