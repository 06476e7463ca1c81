"""An environment that blocks the event loop for ever is named, ends the rollout process, and is not asked for ever."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async import config as configuration
from megatron_async.bank import Bank, State
from megatron_async.bank.dialects import make_engine
from megatron_async.bank.viewing import latest
from megatron_async.rollout import blocking, loop_watchdog
from megatron_async.rollout.blocking import Call
from megatron_async.rollout.loop_watchdog import EXIT_BLOCKED, SAY_S, LoopWatchdog
from tests.bank_support import running, states
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.test_rollout_controller import make_config, open_bank, play
from tests.unit.test_rollout_process import make_run

CALL = Call(object(), "step", "t-1", "g-1", "task-7")


class Watched:
    """A watchdog with a clock of our own; the loop is this thread, which beats when told to."""

    def __init__(self, limit_s: float) -> None:
        self.now, self.ended = 0.0, []  # type: ignore[var-annotated]
        self.dog = LoopWatchdog(
            threading.get_ident(), limit_s, lambda call, text: self.ended.append((call, text)), clock=lambda: self.now
        )

    def looks(self, count: int, *, beats: bool = False) -> None:
        for _ in range(count):
            self.now += 1.0
            self.dog._beats += beats
            self.dog.look()


def test_a_stretch_is_named_once_with_its_stack_and_ended_at_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(limit_s=60)
    watched.looks(500, beats=True)
    assert not caplog.records and not watched.ended
    with blocking.inside(CALL):
        watched.looks(59)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"builtins.object.step of task task-7 (trajectory t-1) has blocked the event loop for {SAY_S:.0f} s" in line
    assert "in test_a_stretch_is_named_once" in line and not watched.ended
    with blocking.inside(CALL):
        watched.looks(1)
    assert [call for call, _ in watched.ended] == [CALL]


def test_a_process_that_was_stopped_is_no_blocked_loop(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(limit_s=60)
    watched.looks(3, beats=True)
    watched.now += 1e6
    watched.looks(5)  # the loop comes late, too
    watched.looks(100, beats=True)
    assert not caplog.records and not watched.ended


BLOCKS = """
import time
from megatron_async.rollout.environments import build_task_source
from megatron_async.config.schema import EnvironmentConfig

class Blocks:
    async def reset(self):
        while True:
            time.sleep(0.01)
    async def close(self):
        pass

class Tasks:
    def __init__(self, inner):
        self.inner, self.size = inner, inner.size
    def task(self, index):
        return self.inner.task(index)
    def environment(self, task):
        return Blocks()

def build(options, split, seed):
    return Tasks(build_task_source(EnvironmentConfig(), split, seed))
"""


def test_a_rollout_whose_environment_never_comes_back_ends_and_says_which_task(
    tmp_path: Path, smallest_checkpoint: Path
) -> None:
    """`asyncio.timeout` cannot fire, and nothing on the loop can report."""
    (tmp_path / "blocks.py").write_text(BLOCKS)

    async def scenario() -> tuple[int, str, Path]:
        async with ScriptedEngine(6) as engine:
            config = make_run(tmp_path, smallest_checkpoint, [engine.url])
            environment = replace(config.environment, name="blocks:build")
            rollout = replace(config.rollout, turn_deadline_s=0.5)
            config = replace(config, environment=environment, rollout=rollout)
            file = tmp_path / "run.yaml"
            file.write_text(configuration.dump(config))
            Bank.open(config.bank_url).close()
            paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "megatron_async", "rollout", "--config", str(file),
                env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.PIPE,
            )  # fmt: skip
            try:
                _, said = await asyncio.wait_for(process.communicate(), 120)
            finally:
                if process.returncode is None:
                    process.kill()
            return process.returncode or 0, said.decode(), config.run_path

    code, said, run_path = asyncio.run(scenario())
    (row,) = [json.loads(line) for line in (run_path / "blocked.jsonl").read_text().splitlines()]
    assert code == EXIT_BLOCKED and row["call"].startswith(f"blocks.Blocks.reset of task {row['task']} (trajectory ")
    assert f"{row['call']} has blocked the event loop for" in said.splitlines()[-1]
    assert "in reset" in said and "longer than rollout.turn_deadline_s (0.5 s)" in said.splitlines()[-1]


@pytest.mark.parametrize(("times", "given_up"), [(1, False), (2, True)])
def test_a_group_that_ended_the_process_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, given_up: bool
) -> None:
    config, group = make_config(tmp_path, max_retries=1), "group-000000900"
    monkeypatch.setattr(loop_watchdog.os, "_exit", lambda code: None)
    for _ in range(times):
        loop_watchdog.end_process(config.run_path, 1.0)(Call(object(), "step", "t", group, "task-1"), "it blocked")

    async def scenario() -> None:
        with open_bank(config) as bank:
            bank.start_trajectory(running("t", group))
            async with ScriptedEngine(4) as engine:
                await play(config, bank, engine, lambda controller, trainer: trainer.train(1))

    asyncio.run(scenario())
    left, rows = states(config.bank_url), {row.trajectory_id: row for row in latest(make_engine(config.bank_url), 100)}
    others = [name for name in left if name.startswith(group)]
    assert left["t"] == State.FAILED and bool(others) != given_up  # its place is taken by another attempt, or by none
    assert ("blocked the event loop 2 times" in (rows["t"].reason or "")) == given_up
