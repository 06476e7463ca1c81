"""A trainer killed at random moments ends with the bits of one that was never killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_async.bank import Bank
from megatron_async.training.checkpointing import list_generations
from tests.bank_support import trajectories_with_tokens
from tests.engine_reference import make_model
from tests.recorded_run import GROUP_SIZE, GROUPS, record_run

WORKER = Path(__file__).with_name("trainer_worker.py")
ROOT = WORKER.parents[2]
STEPS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("moe").save_pretrained(path)
    return path


def start(config: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with (config.parent / "logs" / "trainer.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(WORKER), str(config)],
            env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def run_to_the_end(config: Path) -> dict[str, torch.Tensor]:
    process = start(config)
    code = process.wait(timeout=240)
    assert code == 0, (config.parent / "logs" / "trainer.log").read_text()[-3000:]
    return load_file(config.parent / "checkpoint" / "model.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return run_to_the_end(record_run(tmp_path_factory.mktemp("plain") / "run", model, STEPS))


def kill_at_random(config: Path, dice: random.Random) -> bool:
    """Kill a run somewhere between its first step and its end; False if it ended first."""
    process, bank = start(config), Bank.open(f"sqlite:///{config.parent / 'bank.sqlite'}")
    deadline = time.monotonic() + 240
    committed = sum(step.state == "committed" for step in bank.steps())
    with bank:
        while process.poll() is None and sum(s.state == "committed" for s in bank.steps()) in (0, committed):
            assert time.monotonic() < deadline, (config.parent / "logs" / "trainer.log").read_text()[-3000:]
            time.sleep(0.01)
    time.sleep(dice.uniform(0.0, 2.0))
    ended = process.poll() is not None
    if not ended:
        os.killpg(process.pid, signal.SIGKILL) if dice.random() < 0.5 else process.kill()
    process.wait()
    return not ended


def check_killed_run(config: Path, kills: int, seed: int, uninterrupted: dict[str, torch.Tensor]) -> None:
    dice = random.Random(seed)
    killed = sum(kill_at_random(config, dice) for _ in range(kills))
    assert killed >= 1
    weights = run_to_the_end(config)
    assert [name for name in uninterrupted if not torch.equal(weights[name], uninterrupted[name])] == []
    with Bank.open(f"sqlite:///{config.parent / 'bank.sqlite'}") as bank:
        counts, steps, versions = bank.counts(), bank.steps(), bank.versions()
    assert counts["trained"] == STEPS * GROUPS * GROUP_SIZE
    assert [(step.step, step.state) for step in steps] == [(i, "committed") for i in range(STEPS)]
    # Ids only grow, and the last version has as many updates behind it as there are steps.
    parents = {version.version: version.parent for version in versions}
    assert len(parents) == len(versions) >= STEPS + 1
    depth, version = 0, steps[-1].version_after
    while version is not None and parents[version] is not None:
        depth, version = depth + 1, parents[version]
    assert depth == STEPS
    assert not list((config.parent / "checkpoints").glob(".step_*"))
    assert list_generations(config.parent / "checkpoints")[-1].steps == STEPS


def test_a_killed_run_ends_with_the_same_bits(
    model: Path, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    """Also with a bank that keeps no more than a resume needs: the last two of the generations 3, 6, 9 and 12."""
    config = record_run(tmp_path / "run", model, STEPS, bank={"keep": "resumable"})
    check_killed_run(config, 2, 1, uninterrupted)
    url = f"sqlite:///{config.parent / 'bank.sqlite'}"
    with Bank.open(url) as bank:
        assert bank.discarded_through() == 8
    assert trajectories_with_tokens(url) == {step: GROUPS * GROUP_SIZE for step in (9, 10, 11)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_kill_at_a_random_moment(
    model: Path, tmp_path: Path, uninterrupted: dict[str, torch.Tensor], seed: int
) -> None:
    config = record_run(tmp_path / "run", model, STEPS)
    check_killed_run(config, 1, 100 + seed, uninterrupted)
