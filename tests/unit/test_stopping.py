"""A stop between two steps: who may ask for it, who hears of it, and how long the launcher waits."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async.bank import Bank
from megatron_async.bank.requests import STOP
from megatron_async.config.schema import BatchConfig, ModelConfig, RunConfig, TrainerConfig
from megatron_async.observe import RunFiles
from megatron_async.stopping import Stopping, newest_checkpoint
from megatron_async.supervise import PART_VARIABLE, Asked, Part, StopRequested, first_signal_asks, supervised
from megatron_async.training.batch import BatchFeed
from megatron_async.training.stopping import LAUNCHER, StopAsked, StopRequest
from tests.bank_support import collect_group


def make(folder: Path, stop_deadline_s: float = 60.0) -> RunConfig:
    config = RunConfig(name="run", run_dir=str(folder), model=ModelConfig(path=""))
    trainer = TrainerConfig(deadline_s=60.0, stop_deadline_s=stop_deadline_s)
    config = replace(config, trainer=trainer, batch=BatchConfig(groups=1, group_size=2))
    config.run_path.mkdir()
    return config


# ---------------------------------------------------------------------- the trainer's side


class Alone:
    """`Control` of a world of one rank."""

    rank = 0

    def from_rank_zero(self, produce: Any) -> Any:
        return produce()


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PART_VARIABLE, "mine")


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize("complete", [True, False])
def test_a_stop_is_heard_before_the_next_batch_is_taken_and_while_it_is_waited_for(
    tmp_path: Path, complete: bool
) -> None:
    config = make(tmp_path)
    with Bank.open(config.bank_url) as bank:

        def waits(what: str) -> None:
            bank.set_state(STOP, "mine")

        if complete:
            collect_group(bank, "g0")
            waits("")
        feed = BatchFeed(config, Alone(), bank, waits, stop=StopRequest(bank).by)  # type: ignore[arg-type]
        with pytest.raises(StopAsked, match="after 3 steps by its launcher") as stop:
            feed.take(3, 0)
        assert (stop.value.steps, stop.value.by) == (3, LAUNCHER)
        assert bank.steps() == [] and bank.counts()["finished"] == (2 if complete else 0)


@pytest.mark.usefixtures("marked")
def test_what_was_asked_of_an_earlier_trainer_is_not_heard(tmp_path: Path) -> None:
    config = make(tmp_path)
    with Bank.open(config.bank_url) as bank:
        bank.set_state(STOP, "another")
        collect_group(bank, "g0")
        feed = BatchFeed(config, Alone(), bank, lambda what: None, stop=StopRequest(bank).by)  # type: ignore[arg-type]
        assert len(feed.take(0, 0)) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_a_launcher_the_first_signal_asks_and_the_second_is_not_held_back(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.delenv(PART_VARIABLE, raising=False)
    seen: list[int] = []
    before = signal.signal(number, lambda signum, frame: seen.append(signum))
    try:
        with StopRequest(None) as request:
            assert request.by() == ""
            os.kill(os.getpid(), number)
            assert (request.by(), seen) == (number.name, [])
            os.kill(os.getpid(), number)
            assert seen == [number]
        os.kill(os.getpid(), number)
        assert seen == [number] * 2
    finally:
        signal.signal(number, before)


@pytest.mark.usefixtures("marked")
def test_under_a_launcher_signals_keep_their_meaning() -> None:
    """The kernel sends SIGTERM when a launcher is killed: its ranks must not train on beside the next one's."""
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(None):
        assert signal.getsignal(signal.SIGTERM) is before


# ---------------------------------------------------------------------- the launcher's side

# A trainer that ends when it is asked to, unless it is deaf.
TRAINER = """
import sys, time
from megatron_async.bank import Bank
from megatron_async.training.stopping import StopRequest
with Bank.open(sys.argv[1]) as bank:
    stop = StopRequest(bank)
    while sys.argv[2] == "deaf" or not stop.by():
        time.sleep(0.02)
    bank.commit_step(0, 0, 0)
raise SystemExit(int(sys.argv[2]))
"""


def stop_run(config: RunConfig, what: str, *, in_step: bool, said: list[str]) -> StopRequested:
    """One trainer, which then takes a batch or does not, and a first Ctrl-C."""
    trainer = Part("trainer", [sys.executable, "-c", TRAINER, config.bank_url, what], config.run_path / "trainer.log")
    asked = Asked()
    with Bank.open(config.bank_url) as bank, supervised([trainer]):
        trainer.start()
        stopping = Stopping(config, bank, trainer, asked, said.append, lambda: None)
        stopping()  # nobody has asked
        if in_step:
            collect_group(bank, "g0")
            assert bank.take_batch(0, 1, 2, 0)
        asked.by = "SIGINT"
        with pytest.raises(StopRequested) as stop:
            stopping()
    return stop.value


def test_the_launcher_waits_for_the_step_and_says_where_a_resume_goes_on(tmp_path: Path) -> None:
    config, said = make(tmp_path), list[str]()
    folder = RunFiles(config.run_path).checkpoints / "step_000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    stop = stop_run(config, "0", in_step=True, said=said)
    assert (str(stop), stop.outcome) == ("SIGINT", " after 1 steps, which are in the checkpoint")
    assert "up to 60 s (trainer.stop_deadline_s); a second Ctrl-C" in said[0]


def test_a_trainer_that_fails_meanwhile_is_named(tmp_path: Path) -> None:
    stop = stop_run(make(tmp_path), "7", in_step=True, said=[])
    assert "newest checkpoint holds 0, the others are trained again; the trainer ended with exit code 7" in stop.outcome


def test_a_step_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    stop = stop_run(make(tmp_path, stop_deadline_s=0.2), "deaf", in_step=True, said=[])
    assert "did not end in 0.2 s (trainer.stop_deadline_s)" in stop.outcome


def test_a_trainer_that_has_done_nothing_since_its_start_is_not_waited_for(tmp_path: Path) -> None:
    config, said = make(tmp_path), list[str]()
    stop = stop_run(config, "deaf", in_step=False, said=said)
    assert (said, stop.outcome) == ([], " before a step was trained")
    with Bank.open(config.bank_url) as bank:
        assert bank.get_state(STOP) is None


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert newest_checkpoint(files) == 0
    for name in ("step_000004", "step_000009", "step_000012", ".step_000020.a"):
        (files.checkpoints / name).mkdir(parents=True)
        if name != "step_000012":
            (files.checkpoints / name / "manifest.json").touch()
    assert newest_checkpoint(files) == 9


def two_signals() -> None:
    with first_signal_asks() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.by == "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)


def test_the_first_signal_is_noted_and_the_second_stops_at_once() -> None:
    with pytest.raises(StopRequested) as stop:
        two_signals()
    assert stop.value.at_once and str(stop.value) == "SIGINT"


def test_a_first_signal_that_nobody_looked_at_is_not_lost() -> None:
    with pytest.raises(StopRequested, match="SIGINT") as stop, first_signal_asks():
        os.kill(os.getpid(), signal.SIGINT)
    assert not stop.value.at_once


def test_a_stop_at_once_gives_no_grace(tmp_path: Path) -> None:
    """A part that ignores SIGTERM would get its grace; nothing here waits for it."""
    deaf = f"trap 'touch {tmp_path}/told' TERM; touch {tmp_path}/deaf; while true; do sleep 0.05; done"
    part = Part("deaf", ["sh", "-c", deaf], tmp_path / "log")
    part.start()
    while not (tmp_path / "deaf").exists():
        time.sleep(0.01)
    with pytest.raises(StopRequested), supervised([part]):
        raise StopRequested("SIGINT", at_once=True)
    assert part.poll() is not None and part.descendants() == []
    assert not (tmp_path / "told").exists()
