"""Evaluations while a run trains: at every n-th step, one at a time, and nobody waits for one or ends with one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async import periodic_evaluation
from megatron_async.bank import Bank
from megatron_async.config.schema import EvaluationConfig, ModelConfig, RunConfig
from megatron_async.errors import UserError
from megatron_async.periodic_evaluation import PeriodicEvaluation
from megatron_async.supervise import Part, supervised
from tests.bank_support import collect_group

COMMAND = """
import json, sys, time
from pathlib import Path
run, folder = Path(sys.argv[1]), Path(sys.argv[-1])
(run / "begun").open("a").write(f"{folder.parent.name}\\n")
while not (run / "go").exists():
    time.sleep(0.01)
if (run / "fail").exists():
    sys.exit("no engine answers")
(run / "evaluations.jsonl").open("a").write(json.dumps({"success_rate": 0.5}) + "\\n")
"""
"""Stands in for the command: notes what it was asked, and ends when it is told."""


class Job:
    """A run of ten steps, evaluated every third."""

    def __init__(self, folder: Path, bank: Bank, config: RunConfig, parts: list[Part]) -> None:
        self.folder, self.bank, self.parts = folder, bank, parts
        self.said: list[str] = []
        self.evaluating = PeriodicEvaluation(config, bank, parts, self.said.append)
        self._step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            collect_group(self.bank, f"g{self._step}")
            assert self.bank.take_batch(self._step, 1, 2, 0)
            self.bank.commit_step(self._step, 0, 0)
            self._step += 1
            self.evaluating()

    def begun(self, number: int) -> list[str]:
        """What was asked for, once it is `number` evaluations."""
        notes = self.folder / "begun"
        while not notes.exists() or len(notes.read_text().split()) < number:
            time.sleep(0.01)
        return notes.read_text().split()

    def end(self) -> None:
        """Let the evaluation that runs end, and see it."""
        (self.folder / "go").touch()
        while self.parts:
            time.sleep(0.01)
            self.evaluating()
        (self.folder / "go").unlink()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    config = RunConfig(name="run", run_dir=str(tmp_path), model=ModelConfig(path=""), steps=10)
    config = replace(config, evaluation=EvaluationConfig(every=3))
    config.run_path.mkdir()
    command = [sys.executable, "-c", COMMAND, str(config.run_path)]
    monkeypatch.setattr(periodic_evaluation, "python_module", lambda *argv: [*command, *argv])
    parts: list[Part] = []
    with Bank.open(config.bank_url) as bank, supervised(parts):
        yield Job(config.run_path, bank, config, parts)


def test_every_third_step_is_evaluated_but_not_the_last(job: Job) -> None:
    for number in (1, 2, 3):
        job.train(3)
        assert job.begun(number)[-1] == f"after_{3 * number}_steps"
        job.end()
    job.train(1)
    assert job.parts == []
    assert job.said == [f"after {n} steps: held-out success 50.0 %" for n in (3, 6, 9)]


def test_a_slow_evaluation_makes_the_next_late_and_never_two(job: Job) -> None:
    job.train(8)
    assert len(job.parts) == 1
    assert job.begun(1) == ["after_3_steps"]
    job.end()
    assert job.begun(2) == ["after_3_steps", "after_8_steps"]


def test_an_evaluation_that_fails_is_told_and_ends_nothing(job: Job) -> None:
    (job.folder / "fail").touch()
    job.train(3)
    job.begun(1)
    job.end()
    assert "the evaluation after 3 steps ended with exit code 1" in job.said[0]
    job.train(3)
    assert job.begun(2)[-1] == "after_6_steps"


@pytest.mark.parametrize("error", [OSError("the tasks' file is gone"), UserError("the tasks' server is away")])
def test_an_evaluation_that_cannot_begin_is_told_and_ends_nothing(
    error: Exception, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_args: object) -> Path:
        raise error

    with monkeypatch.context() as now:
        now.setattr(periodic_evaluation, "results_folder", away)
        job.train(3)
    assert job.said == [f"the evaluation after 3 steps could not begin ({error}); training goes on"]
    job.train(3)
    assert job.begun(1) == ["after_6_steps"]


def test_a_run_that_goes_on_begins_with_the_next_multiple(job: Job) -> None:
    job.train(5)
    job.end()
    again: list[Part] = []
    (job.folder / "begun").unlink()
    job.evaluating = PeriodicEvaluation(job.evaluating._config, job.bank, again, job.said.append)
    job.parts = again
    job.evaluating()
    assert again == []
    job.train(1)
    with supervised(again):
        assert job.begun(1) == ["after_6_steps"]
