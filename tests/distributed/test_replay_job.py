"""`megatron-async replay` with real trainer ranks: equal data and options give equal bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_async import training_record
from megatron_async.bank import Bank
from megatron_async.observe import read_metrics
from tests.engine_reference import make_model
from tests.recorded_run import GROUP_SIZE, GROUPS, record_run

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "faults" / "trainer_worker.py"
STEPS, DEADLINE_S = 3, 540
Weights = dict[str, torch.Tensor]


def check_run(*command: str) -> str:
    """What the command said; fails with it unless it succeeds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, timeout=DEADLINE_S, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def weights(run: Path) -> Weights:
    return load_file(run / "checkpoint" / "model.safetensors")


def differing(one: Weights, other: Weights) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def trained(run: Path) -> list[list[str]]:
    """Ids of the trajectories of every step, in their order. The bank is rolled back for it: ask once."""
    with Bank.open(f"sqlite:///{run / 'bank.sqlite'}") as bank:
        assert bank.counts()["trained"] == STEPS * GROUPS * GROUP_SIZE
        bank.rollback_uncommitted(-1)
        batches = [bank.take_batch(step, GROUPS, GROUP_SIZE, 0) or [] for step in range(STEPS)]
    return [[trajectory.trajectory_id for trajectory in batch] for batch in batches]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_replays_have_the_bits_of_the_recorded_run(tmp_path: Path) -> None:
    """The recorded trainer took its batches as they became ready; the replays take them from the record."""
    make_model("moe").save_pretrained(tmp_path / "model")
    run = tmp_path / "recorded"
    check_run(str(WORKER), str(record_run(run, tmp_path / "model", STEPS)))
    start = load_file(tmp_path / "model" / "model.safetensors")
    recorded = weights(run)
    assert differing(recorded, start), "the recorded run has learnt nothing: equal bits would say nothing"
    for name in ("one", "two"):
        said = check_run("-m", "megatron_async", "replay", str(run), "--name", name)
        assert f"replay {STEPS}/{STEPS}" in said
        assert [row["step"] for row in read_metrics(tmp_path / name)] == list(range(STEPS))
        known = training_record.read(tmp_path / name / "checkpoint")
        assert known == training_record.read(run / "checkpoint") and len(known or ()) == 1
    order = trained(run)
    for name in ("one", "two"):
        assert differing(weights(tmp_path / name), recorded) == []
        assert trained(tmp_path / name) == order
