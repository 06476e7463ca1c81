"""The guide's environment is the file that is tested, keeps the interface, and plays through the agent loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.schema import EnvironmentConfig
from megatron_async.rollout.environments import (
    AssistantTurn,
    Environment,
    EnvironmentFailure,
    Message,
    TaskSource,
    ToolCall,
    build_task_source,
)
from megatron_async.rollout.episode_limits import EpisodeLimits
from tests.unit.scripted_agent import check_episode

DOCS = Path(__file__).parents[2] / "docs"
NAME = "higher_lower:build"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "examples"))


def source(split: Any = "train", **options: int) -> TaskSource:
    return build_task_source(EnvironmentConfig(NAME, options), split, 3)


def guess(number: Any) -> AssistantTurn:
    return AssistantTurn("", (ToolCall("guess", {"number": number}),))


def test_guide_shows_the_file_that_is_tested() -> None:
    code = (DOCS / "examples" / "higher_lower.py").read_text()
    assert f"```python\n{code}```\n" in (DOCS / "environments.md").read_text()


def test_bisection_succeeds_on_every_task_of_both_splits() -> None:
    async def bisect(environment: Any) -> float:
        await environment.reset()
        low, high = 1, 100
        step, number = None, 0
        while step is None or not step.done:
            if step is not None:
                low, high = (number + 1, high) if step.messages[0].content == "higher" else (low, number - 1)
            number = (low + high) // 2
            step = await environment.step(guess(number))
        reward, _ = await environment.reward()
        return float(reward)

    seen = {}
    for split in ("train", "heldout"):
        tasks = source(split)
        assert isinstance(tasks, TaskSource)
        assert isinstance(tasks.environment(tasks.task(0)), Environment)
        seen[split] = {tasks.task(index).task_id for index in range(50)}
        rewards = [asyncio.run(bisect(tasks.environment(tasks.task(index)))) for index in range(50)]
        assert rewards == [1.0] * 50
    assert not seen["train"] & seen["heldout"]


def test_an_episode_through_the_agent_loop(tmp_path: Path) -> None:
    """Bisection said by a sampler: ids and mask are those of the conversation, and the reward is the environment's."""
    tasks = source()
    task = tasks.task(0)
    said = [Message("assistant", "", (ToolCall("guess", {"number": n}),)) for n in bisection(task.data["secret"])]
    limits = EpisodeLimits(max_turns=8, max_tokens=20_000, turn_deadline_s=60.0, trajectory_deadline_s=90.0)
    check_episode(tmp_path, tasks, task, said, limits)


def bisection(secret: int) -> list[int]:
    guesses, low, high = [], 1, 100
    while not guesses or guesses[-1] != secret:
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if guesses[-1] < secret else (low, guesses[-1] - 1)
    return guesses


def test_mistakes_cost_guesses_and_a_broken_environment_is_no_reward() -> None:
    tasks = source(guesses=2)
    environment: Any = tasks.environment(tasks.task(0))

    async def fail() -> tuple[float, Any]:
        await environment.reset()
        first = await environment.step(AssistantTurn("seven?"))
        second = await environment.step(guess("seven"))
        assert (first.done, second.done, second.messages[0].content) == (False, True, "not a number")
        outcome: tuple[float, Any] = await environment.reward()
        return outcome

    assert asyncio.run(fail())[0] == 0.0
    environment.left = -101
    with pytest.raises(EnvironmentFailure, match="counter is broken"):
        asyncio.run(environment.reward())


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="gueses"):
        source(gueses=3)
