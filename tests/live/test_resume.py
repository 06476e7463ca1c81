"""A whole run killed by SIGKILL goes on with `launch --resume`: versions, batches and trajectories stay consistent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_async.bank import Bank
from megatron_async.observe import read_evaluations, read_metrics
from megatron_async.training.checkpointing import list_generations
from tests.live.test_main_job import processes_of, start, write_config
from tools.benchmark_rows import ROOT

STEPS = 8


def kill_after(config: Path, run: Path, steps: int) -> None:
    """SIGKILL to `launch` once the run has that many steps and a generation; its children end by themselves."""
    job = start(config)
    deadline = time.monotonic() + 400
    while len(read_metrics(run)) < steps or not list_generations(run / "checkpoints"):
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline, f"not {steps} steps in 400 s"
        time.sleep(0.1)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    _, stubborn = psutil.wait_procs(processes_of(config.parent), timeout=30)
    assert stubborn == []


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    model, run = tmp_path / "tiny", tmp_path / "runs" / "job"
    subprocess.run([sys.executable, ROOT / "tools/make_tiny_checkpoint.py", "--out", model, "--seed", "0"], check=True)
    objective = {"anchor": "snapshot", "mask_low": 0.5, "mask_high": 2.0}
    config = write_config(tmp_path, model, steps=STEPS, objective=objective, trainer={"deadline_s": 620})
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "checkpoint": {"every": 2}}))
    kill_after(config, run, 5)
    with Bank.open(f"sqlite:///{run / 'bank.sqlite'}") as bank:
        before, lost = bank.versions()[-1].version, [step.step for step in bank.steps() if step.state == "committed"]
    resumed_at = list_generations(run / "checkpoints")[-1]
    job = subprocess.run(
        [sys.executable, "-m", "megatron_async", "launch", "--config", str(config), "--resume"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=400,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout + job.stderr
    with Bank.open(f"sqlite:///{run / 'bank.sqlite'}") as bank:
        versions, steps, counts = bank.versions(), bank.steps(), bank.counts()
    assert [(step.step, step.state) for step in steps] == [(i, "committed") for i in range(STEPS)]
    assert counts["trained"] == 12 * STEPS
    assert counts["reserved"] == 0
    new = [version for version in versions if version.version > before]
    assert new[0].parent == resumed_at.version
    assert len(new) == STEPS - resumed_at.steps
    # Lost steps were trained again on their recorded batches.
    assert set(lost) <= {step.step for step in steps}
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["objective/anchor/exact"] == 1.0 for row in rows)
    # Old log-probs of a lost version's tokens are still those of the weights that sampled them.
    assert all(row["objective/log_discrepancy/mean_abs"] <= 1e-5 for row in rows)
    assert read_evaluations(run)[-1]["versions"] == [versions[-1].version] * 2
    assert len(read_evaluations(run)) == 2
