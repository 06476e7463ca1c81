"""Parts that stand still are ended, named, and started again: real processes, real stops, and a clock of our own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_async import roles
from megatron_async.bank import Bank
from megatron_async.bank.requests import PHASE, TRAINING
from megatron_async.config.schema import ModelConfig, RunConfig, TrainerConfig
from megatron_async.health import Guard
from megatron_async.observe.status import StatusWriter
from megatron_async.roles import Roles
from megatron_async.supervise import Part, PartFailed, supervised
from tests.bank_support import collect_group

LIMIT_S = 50.0
LIVES = f"""
import os, pathlib, re, sys, time
from megatron_async import heart
heart.beat(pathlib.Path(os.environ["{"MEGATRON_ASYNC_BEATS"}"]), 0.01)
if "holds" in sys.argv:
    re.match("(a+)+b", "a" * 60)  # one call, which ends in some thousand years
time.sleep(120)
"""
# As torchrun does: a rank in a session of its own, under a process that does not beat.
AGENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], start_new_session=True)"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def configured(folder: Path, **trainer: float) -> RunConfig:
    config = RunConfig(name="run", run_dir=str(folder), model=ModelConfig(path=""))
    return replace(config, trainer=replace(TrainerConfig(health_deadline_s=LIMIT_S), **trainer))


@contextmanager
def living(folder: Path, *words: str) -> Iterator[tuple[Part, Guard, Clock, int]]:
    """A part that beats, a guard of it, the guard's clock, and the id of the process that beats."""
    part, clock = Part("trainer", [sys.executable, "-c", AGENT, LIVES, *words], folder / "trainer.log"), Clock()
    with supervised([part]):
        part.start()
        guard = Guard(configured(folder), [part], clock=clock)
        wait_until(lambda: bool(part.beats()))
        yield part, guard, clock, next(iter(part.beats()))


def wait_until(condition: object) -> None:
    limit = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < limit
        time.sleep(0.005)


def look(guard: Guard, clock: Clock, part: Part, seconds: float) -> None:
    """Let the guard look once a second of its clock."""
    for _ in range(int(seconds)):
        if part.poll() is None:
            clock.now += 1.0
            guard()


def test_a_rank_that_stops_ends_its_part_and_one_that_beats_does_not(tmp_path: Path) -> None:
    """Nor does an observer that slept blame anybody."""
    with living(tmp_path) as (part, guard, clock, rank):
        while clock.now < LIMIT_S + 10:
            before = part.beats()
            wait_until(lambda before=before: part.beats() != before)  # type: ignore[misc]
            clock.now += 4.5
            guard()
        clock.now += 1e6
        guard()
        assert part.poll() is None
        os.kill(rank, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(rank).status() == psutil.STATUS_STOPPED)
        look(guard, clock, part, LIMIT_S - 10)
        assert part.poll() is None
        look(guard, clock, part, 20)
        assert part.poll() not in (None, 0) and not part.owns(rank)
        words = rf"trainer was ended: its process {rank} gave no sign of life for 5\d s .*50\): it is stopped"
        with pytest.raises(PartFailed, match=words):
            raise part.failure()


def test_a_stopped_launcher_of_ranks_is_noticed_though_they_live(tmp_path: Path) -> None:
    with living(tmp_path) as (part, guard, clock, _):
        assert part.pid is not None
        os.kill(part.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(part.pid).status() == psutil.STATUS_STOPPED)
        look(guard, clock, part, LIMIT_S + 5)
        assert part.poll() is not None and "has been stopped for" in part.ending()


def test_one_call_that_holds_the_interpreter_is_ended_with_its_stack_in_the_log(tmp_path: Path) -> None:
    with living(tmp_path, "holds") as (part, guard, clock, _):
        before = None
        while part.beats() != before:  # until the call has begun
            before = part.beats()
            time.sleep(0.2)
        look(guard, clock, part, LIMIT_S + 5)
        assert part.poll() is not None and "holds its interpreter" in part.ending()
    assert "match" in part.log_path.read_text()


@pytest.mark.parametrize(
    ("phase", "waits_for", "moves", "ended"),
    [("update", "", False, True), ("wait_batch", "batch: 0 of 2", False, False), ("update", "", True, False)],
)
def test_a_stage_in_which_nothing_moves_is_ended(
    tmp_path: Path, phase: str, waits_for: str, moves: bool, ended: bool
) -> None:
    config, clock = configured(tmp_path, stage_deadline_s=20.0), Clock()
    part = Part("trainer", ["sleep", "60"], tmp_path / "log")
    status = StatusWriter(config.run_path, "trainer", interval_s=0)
    status.set(phase, waits_for)
    with supervised([part]):
        part.start()
        guard = Guard(config, [part], with_stages=["trainer"], clock=clock)
        for second in range(40):
            if part.poll() is None:
                status.count(step=second if moves else 0)
                look(guard, clock, part, 1)
        assert (part.poll() is not None) == ended
    if ended:
        assert "nothing moved in stage 'update' for 20 s (trainer.stage_deadline_s=20)" in part.ending()


STOPS_ONCE = 'echo r >> "$0"; if [ $(grep -c r "$0") = 1 ]; then kill -STOP $$; fi; exec sleep 60'


def test_a_frozen_rollout_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "_POLL_S", 0.02)
    monkeypatch.setattr(roles, "_PAUSE_S", 0.0)
    config = configured(tmp_path, health_deadline_s=0.2)
    config.run_path.mkdir()
    with Bank.open(config.bank_url) as bank:
        bank.set_state(PHASE, TRAINING)
        collect_group(bank, "g")
        bank.take_batch(0, 1, 2, 0)
        bank.commit_step(0, 0, 0)
    starts = tmp_path / "starts"
    rollout = Part("rollout", ["sh", "-c", STOPS_ONCE, str(starts)], tmp_path / "rollout.log")
    until = f"until [ $(grep -c r {starts}) -ge 2 ]; do sleep 0.02; done"
    trainer = Part("trainer", ["sh", "-c", f"touch {starts}; {until}"], tmp_path / "trainer.log")
    parts: list[Part] = []
    with supervised(parts):
        Roles(config, [trainer], rollout, parts).run()
    row = (config.run_path / "restarts.jsonl").read_text()
    assert '"part": "rollout"' in row and "has been stopped for" in row
