"""BFCL multi-turn behind the environment interface: references succeed, the benchmark's own checker agrees."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.schema import EnvironmentConfig
from megatron_async.rollout.environments import (
    AssistantTurn,
    Message,
    TaskSource,
    ToolCall,
    bfcl,
    build_task_source,
)
from megatron_async.rollout.episode_limits import EpisodeLimits
from tests.unit.scripted_agent import check_episode

installed = pytest.mark.skipif(
    importlib.util.find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed (requirements/tau2.txt)"
)


def source(category: str = "base", split: Any = "heldout", **options: Any) -> Any:
    return build_task_source(EnvironmentConfig("bfcl", {"category": category, **options}), split, 0)


def named(environment: Any, text: str) -> ToolCall:
    """A reference call with its positional arguments named, as an agent would write it."""
    name, positional, arguments = bfcl.parse_call(text)
    method = environment._agent._method(name)
    names = list(importlib.import_module("inspect").signature(method).parameters)
    return ToolCall(name, {**dict(zip(names, positional)), **arguments})


async def play(environment: Any, requests: list[list[str]]) -> tuple[float, dict[str, Any]]:
    await environment.reset()
    for request in requests:
        for text in request:
            await environment.step(AssistantTurn("", (named(environment, text),)))
        if (await environment.step(AssistantTurn("Done."))).done:
            break
    outcome: tuple[float, dict[str, Any]] = await environment.reward()
    return outcome


@installed
def test_an_episode_through_the_agent_loop(tmp_path: Path) -> None:
    """The reference's calls said by a sampler: ids and mask are those of the conversation, the reward is 1."""
    tasks = source()
    task = tasks.task(0)
    start, said = tasks.environment(task), []
    for request in bfcl._data("base")[1][0]:
        said += [Message("assistant", "", (named(start, text),)) for text in request]
        said.append(Message("assistant", "Done."))
    limits = EpisodeLimits(max_turns=60, max_tokens=200_000, turn_deadline_s=60.0, trajectory_deadline_s=90.0)
    check_episode(tmp_path, tasks, task, said, limits)


@installed
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("category", bfcl.CATEGORIES)
def test_references_succeed_on_all_tasks_and_nothing_on_none(category: str, stride: int) -> None:
    tasks = source(category)
    assert isinstance(tasks, TaskSource)
    references = bfcl._data(category)[1]
    outcomes = [
        asyncio.run(play(tasks.environment(tasks.task(index)), references[index]))
        for index in range(0, tasks.size, stride)
    ]
    assert tasks.size == 200
    assert [reward for reward, _ in outcomes] == [1.0] * (200 // stride)
    idle = [
        asyncio.run(play(tasks.environment(tasks.task(i)), [[] for _ in references[i]]))
        for i in range(50 // stride)
    ]
    assert {reward for reward, _ in idle} == {0.0}


@installed
def test_verdicts_are_those_of_the_benchmarks_checker() -> None:
    checker = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
    tasks = source()
    entries, references = bfcl._data("base")
    verdicts = []
    for index in range(30):
        calls = [list(request) for request in references[index]]
        if index % 3 == 0:
            calls[-1] = calls[-1][:-1]
        elif index % 3 == 1:
            calls[0] = calls[0][::-1]
        theirs = checker.multi_turn_checker(
            [[[call] for call in request] for request in calls],
            references[index],
            entries[index],
            "",
            f"m{index}",
        )
        ours, info = asyncio.run(play(tasks.environment(tasks.task(index)), calls))
        verdicts.append(ours)
        assert ours == float(theirs["valid"]), (index, info, theirs)
    assert 0.0 < sum(verdicts) < 30.0


@installed
def test_tools_are_json_schemas() -> None:
    tasks = source()
    start = asyncio.run(tasks.environment(tasks.task(0)).reset())
    names = {tool["function"]["name"] for tool in start.tools}
    assert {"mv", "grep", "post_tweet"} <= names
    assert {tool["function"]["parameters"]["type"] for tool in start.tools} == {"object"}


@installed
def test_function_that_was_held_back_comes_with_a_later_request() -> None:
    tasks = source("miss_func")
    environment = tasks.environment(tasks.task(0))
    start = asyncio.run(environment.reset())
    held = bfcl._data("miss_func")[0][0]["missed_function"]["3"]
    assert not set(held) & {tool["function"]["name"] for tool in start.tools}
    environment._request = 2
    environment._reference = [[] for _ in environment._reference]  # nothing is to be done: words end a request
    step = asyncio.run(environment.step(AssistantTurn("Done.")))
    assert held[0] in step.messages[0].content
    assert {tool["function"]["name"] for tool in step.added_tools} == set(held)
    assert not asyncio.run(environment.step(AssistantTurn("Done."))).added_tools


@installed
def test_calls_are_methods_only() -> None:
    tasks = source()
    environment = tasks.environment(tasks.task(0))

    async def say(*calls: ToolCall) -> list[str]:
        return [message.content for message in (await environment.step(AssistantTurn("", calls))).messages]

    asyncio.run(environment.reset())
    code = ToolCall("__import__('os').getcwd", {})
    private = ToolCall("_load_scenario", {"scenario": {}})
    wrong = ToolCall("cd", {"nowhere": 1})
    answers = asyncio.run(say(code, private, wrong))
    assert all(answer.startswith("Error during execution:") for answer in answers)
    assert "is not defined" in answers[0]
    assert "is not defined" in answers[1]


@installed
def test_endless_calls_end_the_episode() -> None:
    tasks = source()
    environment = tasks.environment(tasks.task(0))
    asyncio.run(environment.reset())
    turn = AssistantTurn("", (ToolCall("pwd", {}),))
    steps = [asyncio.run(environment.step(turn)) for _ in range(21)]
    assert [step.done for step in steps] == [False] * 20 + [True]
    assert asyncio.run(environment.reward())[1]["failure"] == "force_terminated"


@installed
def test_training_needs_the_flag_and_is_stamped() -> None:
    with pytest.raises(ValueError, match="no training tasks"):
        source(split="train")
    tasks = source(split="train", train_on_evaluation_tasks=True)
    assert tasks.task(0).data["trained_on_evaluation_tasks"] == 200
    assert tasks.labels() == {"trained_on_evaluation_tasks": "200"}
    assert source(train_on_evaluation_tasks=True).labels() == {}, "an endpoint may be evaluated so"


def test_missing_package_and_unknown_options_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="categry"):
        source(categry="base")
    with pytest.raises(ValueError, match="known: base"):
        source("single_turn")
    bfcl._data.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(bfcl.BfclNotInstalled, match="--no-deps bfcl-eval"):
        source()
