"""Environments are users' code: whatever they raise or answer, and wherever, ends their own episode and no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.bank import State
from megatron_async.errors import UserError
from megatron_async.rollout import blocking
from megatron_async.rollout.agent_loop import run_episode
from megatron_async.rollout.environments.base import Message, Start, Step, Task
from megatron_async.rollout.readable import readable
from megatron_async.trajectory import SamplingParams, Status, Trajectory
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.scripted_rollout import PlainChat, RuleSampler, ScriptedEnvironment, ScriptedSource
from tests.unit.test_agent_loop import LIMITS
from tests.unit.test_agent_loop import play as play_episode
from tests.unit.test_rollout_controller import make_config, open_bank
from tests.unit.test_rollout_controller import play as play_rollout


async def _awaits_a_task_that_was_cancelled() -> Any:
    """As a client does whose connection was closed under it."""
    other = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(other.cancel)
    await other


async def _exits() -> Any:
    raise SystemExit(0)


async def _group() -> Any:
    raise BaseExceptionGroup("of a task group", [asyncio.CancelledError(), KeyError("x")])


def _before_it_is_awaited() -> Any:
    raise KeyError("x")


def _awaits_nothing() -> Any:
    return Step([], done=True)


ODD = [_awaits_a_task_that_was_cancelled, _exits, _group, _before_it_is_awaited, _awaits_nothing]


def _environment(method: str, call: Callable[[], Any]) -> ScriptedEnvironment:
    environment = ScriptedEnvironment()
    setattr(environment, method, lambda *turn: call())
    return environment


@pytest.mark.parametrize("method", ["reset", "step", "reward"])
@pytest.mark.parametrize("call", ODD)
def test_whatever_an_environment_raises_is_its_failure(method: str, call: Callable[[], Any]) -> None:
    environment = _environment(method, call)
    trajectory = play_episode(RuleSampler(), environment)
    assert (trajectory.status, trajectory.info["ending"]) == (Status.ENVIRONMENT_ERROR, "environment_exception")
    assert trajectory.reward is None and environment.closed == 1


@pytest.mark.parametrize("call", ODD)
def test_whatever_happens_at_the_close_the_outcome_stands(call: Callable[[], Any]) -> None:
    assert play_episode(RuleSampler(), _environment("close", call)).status is Status.OK


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("reset", None),
        ("reset", Start(None)),  # type: ignore[arg-type]
        ("reset", Start(["hello"])),  # type: ignore[list-item]
        ("reset", Start(iter([Message("user", "hello")]))),  # type: ignore[arg-type]
        ("step", None),
        ("step", Step("hello", done=False)),  # type: ignore[arg-type]
        ("step", Step([None], done=False)),  # type: ignore[list-item]
        ("reward", None),
        ("reward", 1.0),
        ("reward", (None, {})),
        ("reward", (10**400, {})),
        ("reward", (float("nan"), {})),
        ("reward", (float("-inf"), {})),
    ],
)
def test_an_answer_that_is_none_is_the_environments_failure(method: str, answer: Any) -> None:
    async def answers() -> Any:
        return answer

    trajectory = play_episode(RuleSampler(), _environment(method, answers))
    assert (trajectory.status, trajectory.info["ending"]) == (Status.ENVIRONMENT_ERROR, "bad_answer")
    assert f"{method} answered" in trajectory.info["failure"]


def test_what_json_cannot_hold_in_the_info_becomes_text() -> None:
    """A policy can make an environment repeat its arguments: they are no reason to leave the episode out."""
    endless: dict[str, Any] = {}
    endless["again"] = endless
    odd = {"nan": float("nan"), "many": 10**30, "set": {1}, "numpy": np.float32(0.5), "\ud83d": "\udc00"}

    async def reward() -> Any:
        return np.float32(1.0), odd

    trajectory = play_episode(RuleSampler(), _environment("reward", reward))
    assert trajectory.status is Status.OK and trajectory.reward == 1.0
    assert Trajectory.from_bytes(trajectory.to_bytes()).info["reward"] == {
        "nan": "NaN", "many": str(10**30), "set": "{1}", "numpy": 0.5, "?": "?",
    }  # fmt: skip
    assert "Circular" in readable(endless)["unreadable"]
    assert readable(None) == {} and readable([1]) == {"value": [1]}
    json.dumps(readable({"deep": json.loads("[" * 900 + "]" * 900)}))


class _Stubborn(ScriptedEnvironment):
    """Tries for ever, whatever comes: a bare `except` in a loop of retries. Only the collector of garbage ends it."""

    answers = left = False

    async def step(self, turn: Any) -> Step:
        while True:
            try:
                await asyncio.sleep(30)
            except BaseException as caught:
                if self.answers:
                    return Step([], done=False)
                if self.left:
                    raise
                self.left = isinstance(caught, GeneratorExit)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "LETS_GO_S", 0.05)


@pytest.mark.parametrize("answers", [False, True])
def test_a_deadline_holds_whatever_is_caught(quickly: None, answers: bool) -> None:
    environment = _Stubborn()
    environment.answers = answers
    trajectory = play_episode(RuleSampler(), environment, replace(LIMITS, turn_deadline_s=0.1))
    assert (trajectory.status, trajectory.info["ending"]) == (Status.ENVIRONMENT_ERROR, "environment_timeout")
    assert environment.closed == 1


@pytest.mark.parametrize("answers", [False, True])
def test_the_deadline_of_the_trajectory_holds_too(quickly: None, answers: bool) -> None:
    environment = _Stubborn()
    environment.answers = answers
    limits = replace(LIMITS, trajectory_deadline_s=0.1)
    trajectory = play_episode(RuleSampler(), environment, limits)
    assert (trajectory.status, trajectory.info["ending"]) == (Status.ABORTED, "trajectory_deadline")


@pytest.mark.parametrize("answers", [False, True])
def test_a_stop_is_heard_whatever_is_caught(quickly: None, answers: bool) -> None:
    environment = _Stubborn()
    environment.answers = answers

    async def scenario() -> bool:
        trajectory = Trajectory("t", "g", "p", SamplingParams(max_new_tokens=20))
        episode = asyncio.create_task(run_episode(RuleSampler(), PlainChat(), environment, trajectory, LIMITS))
        await asyncio.sleep(0.1)
        episode.cancel()
        await asyncio.wait({episode})
        return episode.cancelled() and not trajectory.finished

    assert asyncio.run(scenario()) and environment.closed == 1


def test_nothing_that_one_environment_does_stops_the_others(tmp_path: Path) -> None:
    """One task has no environment, another's client is cut off, a third exits: their groups are given up, the rest is
    trained, and no trajectory stays behind as running."""
    tasks = [_awaits_a_task_that_was_cancelled, _exits]

    def make(task: Task) -> ScriptedEnvironment:
        number = task.data["index"] % 5
        if number == 2:
            raise KeyError("no such world")
        return _environment("step", tasks[number]) if number < len(tasks) else ScriptedEnvironment()

    async def scenario() -> None:
        config = make_config(tmp_path, max_retries=0, flush_s=0)
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                source = ScriptedSource(make)
                controller, trainer = await play_rollout(config, bank, engine, lambda c, t: t.train(3), source)
                assert {t.task["index"] % 5 for batch in trainer.batches for t in batch} == {3, 4}
                assert controller.counters.failed["environment_exception"] >= 3
                assert bank.counts()[State.RUNNING] == 0

    asyncio.run(scenario())


def test_what_the_user_has_to_mend_ends_the_run(tmp_path: Path) -> None:
    def make(task: Task) -> ScriptedEnvironment:
        raise UserError("install the package first")

    async def scenario() -> None:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                await play_rollout(config, bank, engine, lambda c, t: asyncio.sleep(10), ScriptedSource(make))

    with pytest.raises(UserError, match="install the package"):
        asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_call_may_clean_up_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled, it goes on awaiting and ends by itself: nothing cuts it short, and nothing is cancelled afterwards."""
    monkeypatch.setattr(blocking, "LETS_GO_S", 30.0)
    cleaned = []

    class Tidy(ScriptedEnvironment):
        async def step(self, turn: Any) -> Step:
            try:
                await asyncio.sleep(30)
            finally:
                await asyncio.sleep(0.05)
                cleaned.append(True)
            return Step([], done=True)

    trajectory = play_episode(RuleSampler(), Tidy(), replace(LIMITS, turn_deadline_s=0.1))
    assert trajectory.info["ending"] == "environment_timeout" and cleaned == [True]


def test_a_call_may_outlive_a_task_that_it_awaited(quickly: None) -> None:
    """That one was cancelled by others; the call was not, and takes its time."""

    class Reconnects(ScriptedEnvironment):
        async def step(self, turn: Any) -> Step:
            try:
                await _awaits_a_task_that_was_cancelled()
            except asyncio.CancelledError:
                await asyncio.sleep(0.2)
            return Step([], done=True)

    assert play_episode(RuleSampler(), Reconnects()).status is Status.OK
