"""The first Ctrl-C lets the trainer end its step and write it down, the second ends everything now.

Engines are scripted; launcher, rollout, bank and environment are the product's, and so is the trainer in the slow test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_async.bank import Bank, Step
from megatron_async.config import load
from megatron_async.config.schema import RunConfig
from megatron_async.observe import RunFiles
from megatron_async.stopping import newest_checkpoint
from tests.faults.chaos_run import MARK, scripted, write_config
from tests.faults.chaos_trainer import UPDATE_VARIABLE, WEIGHTS
from tools.benchmark_rows import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DEADLINE_S = 240.0


@contextmanager
def launched(config: Path, stand_in: bool, update_s: float = 0.05) -> Iterator[subprocess.Popen[str]]:
    """The launcher; whatever it started is gone when the block ends, or it is an error."""
    mark = str(config)
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT), UPDATE_VARIABLE: str(update_s)}
    job = subprocess.Popen(
        [*scripted(stand_in), str(config)], cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield job
        assert left_of(mark) == []
    finally:
        for process in [job, *left_of(mark)]:
            process.kill()


def left_of(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def steps_of(config: RunConfig) -> list[Step]:
    if not (config.run_path / "bank.sqlite").exists():
        return []
    with Bank.open(config.bank_url) as bank:
        return bank.steps()


def wait_until(condition: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + DEADLINE_S
    while not condition():
        assert job.poll() is None and time.monotonic() < limit, job.communicate()[0] if job.poll() is not None else ""
        time.sleep(0.02)


def in_step(config: RunConfig, after: int) -> Callable[[], bool]:
    """A batch is taken and not trained yet, after at least so many steps."""

    def condition() -> bool:
        steps = steps_of(config)
        return len(steps) > after and steps[-1].state == "reserved"

    return condition


def stop_in_a_step(path: Path, config: RunConfig, stand_in: bool, after: int, update_s: float = 0.05) -> int:
    """Launch, Ctrl-C in the middle of a step; how many steps are trained, all of them in the checkpoint."""
    with launched(path, stand_in, update_s) as job:
        wait_until(in_step(config, after), job)
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 130, output
    steps = steps_of(config)
    assert [step.state for step in steps] == ["committed"] * len(steps), output
    assert len(steps) > after and newest_checkpoint(RunFiles(config.run_path)) == len(steps)
    assert f"stopped by SIGINT after {len(steps)} steps, which are in the checkpoint; go on with: " in output
    return len(steps)


def test_the_first_ctrl_c_ends_the_step_and_a_resume_repeats_none(smallest_checkpoint: Path, tmp_path: Path) -> None:
    """Checkpoints are due after every fifth step only: the one that was made is the stop's."""
    path = write_config(
        tmp_path, smallest_checkpoint, steps=5, engines={"count": 1}, checkpoint={"every": 5}, evaluation={"tasks": 2}
    )
    config = load(path, [])
    done = stop_in_a_step(path, config, stand_in=True, after=1, update_s=0.7)
    assert done < 5
    with Bank.open(config.bank_url) as bank:
        versions = bank.versions()
    with launched(path, stand_in=True) as job:
        output, _ = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, output
    trained = json.loads((config.run_path / WEIGHTS).read_text())["trained"]
    assert len(trained) == 5 and len({name for step in trained for name in step}) == 20
    with Bank.open(config.bank_url) as bank:
        assert bank.versions()[: len(versions)] == versions
        assert [version.step for version in bank.versions()[1:]] == list(range(5))  # no step twice


def test_the_second_ctrl_c_ends_everything_now(smallest_checkpoint: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, smallest_checkpoint, steps=5, engines={"count": 1}, evaluation={"tasks": 2})
    with launched(path, stand_in=True, update_s=600.0) as job:
        wait_until(in_step(load(path, []), 0), job)
        job.send_signal(signal.SIGINT)
        assert job.stdout is not None
        while "a second Ctrl-C ends everything now" not in job.stdout.readline():
            assert job.poll() is None
        job.send_signal(signal.SIGINT)
        began = time.monotonic()
        output, _ = job.communicate(timeout=DEADLINE_S)
        took = time.monotonic() - began
    assert job.returncode == 130 and "stopped by SIGINT; go on with" in output
    assert took < 60.0, "on an idle machine 2 s; the step would have taken ten minutes, and the deadline five"
    print(f"ended after {took:.1f} s")


def test_real_trainer_ranks_end_their_step_and_go_on_with_the_next(smallest_checkpoint: Path, tmp_path: Path) -> None:
    path = write_config(
        tmp_path, smallest_checkpoint, steps=6, engines={"count": 1}, checkpoint={"every": 100},
        layout={"world_size": 2},
    )  # fmt: skip
    config = load(path, [])
    done = stop_in_a_step(path, config, stand_in=False, after=2)
    with launched(path, stand_in=False) as job:
        output, _ = job.communicate(timeout=2 * DEADLINE_S)
    assert job.returncode == 0, output
    steps = steps_of(config)
    assert [step.state for step in steps] == ["committed"] * 6 and done < 6
    with Bank.open(config.bank_url) as bank:
        made = [version.step for version in bank.versions()[1:]]
    assert made == sorted(set(made)), f"a step was trained again after the stop at {done}: {made}"
    trained = [row["step"] for row in map(json.loads, (config.run_path / "metrics.jsonl").read_text().splitlines())]
    assert trained == list(range(6))
