"""Episodes follow the benchmark: same messages, same endings, same rewards, and errors where it has errors."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.schema import EnvironmentConfig
from megatron_async.rollout.environments import build_task_source
from megatron_async.rollout.environments.base import AssistantTurn, ReplayableTaskSource, ToolCall
from tests.unit.tau2_support import DOMAINS, altered, as_turn, domain, play, requires_tau2, sample_ids

pytestmark = requires_tau2


def source_of(name: str, solo: bool = False, **options: Any) -> Any:
    values = {"domain": name, "solo": solo, "heldout_split": "base", "user": {"kind": "scripted"}, **options}
    return build_task_source(EnvironmentConfig("tau2", values), "heldout", 0)


def environment_of(source: Any, task_id: str) -> Any:
    tasks = [source.task(index) for index in range(source.size)]
    return source.environment(next(task for task in tasks if task.data["id"] == task_id))


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs from run to run: clocks, costs and the ids of calls."""
    kept = {key: message.get(key) for key in ("role", "content", "requestor", "error", "turn_idx")}
    calls = message.get("tool_calls") or []
    kept["calls"] = [(call["name"], call["arguments"], call["requestor"]) for call in calls]
    return kept


def benchmark_run(name: str, solo: bool, task: Any, recorded: list[dict[str, Any]], **limits: int) -> Any:
    """The benchmark's own orchestrator, run by itself on the recorded agent's and user's messages."""
    package = domain(name, solo).package
    lines = {
        role: iter([package.names[kind](**_timeless(m)) for m in recorded if m["role"] == role])
        for role, kind in (("assistant", "AssistantMessage"), ("user", "UserMessage"))
    }
    skip_greeting = not solo
    if skip_greeting:
        next(lines["assistant"])

    class Agent(package.LLMSoloAgent if solo else package.LLMAgent):  # type: ignore[misc]
        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            return _now(next(lines["assistant"])), state

    class User(package.UserSimulator):  # type: ignore[misc, name-defined]
        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            return _now(next(lines["user"])), state

    constructor = package.registry.get_env_constructor(name)
    environment = constructor(solo_mode=solo)
    arguments = {"tools": environment.get_tools(), "domain_policy": environment.get_policy()}
    agent = Agent(**arguments, task=task) if solo else Agent(**arguments)
    user = package.DummyUser() if solo else User(instructions=str(task.user_scenario))
    return package.Orchestrator(
        domain=name, agent=agent, user=user, environment=environment, task=task, solo_mode=solo, **limits
    ).run()


def _now(message: Any) -> Any:
    return message.model_copy(update={"timestamp": datetime.now().isoformat()})


def _timeless(message: dict[str, Any]) -> dict[str, Any]:
    # the benchmark sorts by clock time: a replayed message must be as young as its replay
    return {key: value for key, value in message.items() if key not in ("timestamp", "turn_idx")}


@pytest.mark.parametrize(("name", "solo"), DOMAINS)
@pytest.mark.parametrize("mode", ["gold", "shuffled"])
def test_transcript_is_that_of_the_benchmarks_own_orchestrator(name: str, solo: bool, mode: str) -> None:
    source = source_of(name, solo)
    for task_id in sample_ids(name, 1 if name == "airline" else 2, solo):
        task = source.context.domain.tasks[task_id]
        reward, info = asyncio.run(play(environment_of(source, task_id), altered(task, mode, solo)))
        theirs = benchmark_run(name, solo, task, info["transcript"], max_steps=200)
        assert [comparable(m) for m in info["transcript"]] == [
            comparable(json.loads(m.model_dump_json())) for m in theirs.messages
        ]
        assert info["termination"] == theirs.termination_reason.value
        package = source.context.domain.package
        verdict = package.evaluate_simulation(
            simulation=theirs,
            task=task,
            evaluation_type=package.EvaluationType.ALL,
            solo_mode=solo,
            domain=name,
        )
        assert reward == verdict.reward


@pytest.mark.parametrize(
    ("limit", "ending"), [({"max_steps": 7}, "max_steps"), ({"max_errors": 2}, "too_many_errors")]
)
def test_limits_end_where_the_benchmarks_do(limit: dict[str, int], ending: str) -> None:
    source = source_of("retail", **limit)
    task_id = sample_ids("retail", 1)[0]
    failing = AssistantTurn("", (ToolCall("get_order_details", {"order_id": "none"}),))
    environment = environment_of(source, task_id)

    async def endless() -> tuple[Any, float, dict[str, Any]]:
        await environment.reset()
        step = await environment.step(failing)
        while not step.done:
            step = await environment.step(failing)
        return step, *(await environment.reward())

    step, reward, info = asyncio.run(endless())
    task = source.context.domain.tasks[task_id]
    theirs = benchmark_run("retail", False, task, [*info["transcript"], *info["transcript"]], **limit)
    assert (info["termination"], reward) == (ending, 0.0) == (theirs.termination_reason.value, 0.0)
    assert len(info["transcript"]) == len(theirs.messages)
    assert step.truncated == (ending == "max_steps")


def test_agent_sees_what_the_benchmarks_agent_sees() -> None:
    source = source_of("airline")
    environment = environment_of(source, "3")
    start = asyncio.run(environment.reset())
    package = source.context.domain.package
    theirs = source.context.domain.official_constructor()
    agent = package.LLMAgent(tools=theirs.get_tools(), domain_policy=theirs.get_policy())
    assert [message.role for message in start.messages] == ["system", "assistant", "user"]
    assert start.messages[0].content == agent.system_prompt
    assert start.messages[1].content == "Hi! How can I help you today?"
    assert start.tools == [tool.openai_schema for tool in theirs.get_tools()]


def test_solo_agent_sees_its_ticket_and_all_tools() -> None:
    source = source_of("telecom", solo=True)
    environment = environment_of(source, sample_ids("telecom", 1, True)[0])
    start = asyncio.run(environment.reset())
    names = {tool["function"]["name"] for tool in start.tools}
    assert [message.role for message in start.messages] == ["system"]
    assert environment.episode.task.ticket in start.messages[0].content
    assert {"done", "toggle_roaming", "get_customer_by_phone"} <= names


def test_user_prompt_is_the_simulators_with_roles_flipped() -> None:
    source = source_of("telecom")
    environment = environment_of(source, sample_ids("telecom", 1)[0])
    pending = environment.episode.start()
    assert pending.turn == "user"
    assert pending.messages[0]["role"] == "system"
    assert str(environment.episode.task.user_scenario) in pending.messages[0]["content"]
    assert pending.messages[1:] == [{"role": "user", "content": "Hi! How can I help you today?"}]
    assert "toggle_airplane_mode" in {t["function"]["name"] for t in environment.episode.user_tool_schemas()}


def play_turns(source: Any, task_id: str, turns: list[AssistantTurn]) -> tuple[Any, float, dict[str, Any]]:
    environment = environment_of(source, task_id)

    async def run() -> tuple[Any, float, dict[str, Any]]:
        await environment.reset()
        for turn in turns:
            step = await environment.step(turn)
        return step, *(await environment.reward())

    return asyncio.run(run())


def test_malformed_turn_is_the_agents_error() -> None:
    source = source_of("retail")
    step, reward, info = play_turns(source, "0", [AssistantTurn("<tool_call>{", (), "tool call 1: not JSON")])
    assert (step.done, reward, info["termination"]) == (True, 0.0, "agent_error")
    assert info["parse_error"] == "tool call 1: not JSON"


def test_unknown_tool_is_answered_and_counted() -> None:
    call = ToolCall("no_such_tool", {})
    step, _, info = play_turns(source_of("retail"), "0", [AssistantTurn("", (call, call))])
    assert [message.content for message in step.messages] == ["Error: Tool 'no_such_tool' not found."] * 2
    assert (step.done, info["tool_errors"], info["termination"]) == (False, 2, "cut")


@pytest.mark.parametrize("arguments", [{"wrong": 1}, {"tool_name": "x"}, {"requestor": "user"}, {}])
def test_wrong_arguments_are_answered_not_raised(arguments: dict[str, Any]) -> None:
    turn = AssistantTurn("", (ToolCall("get_order_details", arguments),))
    step, _, info = play_turns(source_of("retail"), "0", [turn])
    assert step.messages[0].content.startswith("Error:")
    assert info["tool_errors"] == 1


@pytest.mark.parametrize(("enforced", "done"), [(False, False), (True, True)])
def test_text_beside_a_tool_call(enforced: bool, done: bool) -> None:
    source = source_of("retail", enforce_communication_protocol=enforced)
    turn = AssistantTurn("One moment.", (ToolCall("list_all_product_types", {}),))
    step, _, info = play_turns(source, "0", [turn])
    assert step.done is done
    assert info["termination"] == ("agent_error" if enforced else "cut")
    assert info["transcript"][2]["content"] == "One moment."


def test_episode_cut_by_the_agent_loop_scores_zero() -> None:
    source = source_of("airline")
    task = source.context.domain.tasks["0"]
    turns = [as_turn(said) for said in altered(task, "gold", False)[:-1]]
    environment = environment_of(source, "0")

    async def cut() -> tuple[float, dict[str, Any]]:
        await environment.reset()
        for turn in turns:
            await environment.step(turn)
        return await environment.reward()

    reward, info = asyncio.run(cut())
    assert (reward, info["termination"]) == (0.0, "cut")


@pytest.mark.parametrize(("name", "solo"), [("retail", False), ("telecom", True)])
def test_the_same_turns_get_the_same_answers(name: str, solo: bool) -> None:
    source = source_of(name, solo)
    task_id = sample_ids(name, 1, solo)[0]
    turns = altered(source.context.domain.tasks[task_id], "gold", solo)

    async def heard() -> list[Any]:
        environment = environment_of(source, task_id)
        return [await environment.reset(), *[await environment.step(as_turn(said)) for said in turns]]

    assert isinstance(source, ReplayableTaskSource)
    assert source.replayable(source.task(0))
    assert asyncio.run(heard()) == asyncio.run(heard())
    endpoint = {"kind": "endpoint", "endpoint": {"url": "http://127.0.0.1:9/v1"}}
    asked = source_of("retail", user=endpoint)
    assert not asked.replayable(asked.task(0))


def test_own_prompt_and_short_tools_are_stamped(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Be brief. {ticket}")
    source = source_of("telecom", solo=True, system_prompt_file=str(prompt), tool_descriptions="short")
    task_id = sample_ids("telecom", 1, True)[0]
    environment = environment_of(source, task_id)
    start = asyncio.run(environment.reset())
    assert start.messages[0].content == f"Be brief. {environment.episode.task.ticket}"
    assert all("\n" not in tool["function"]["description"] for tool in start.tools)
    _, info = asyncio.run(environment.reward())
    assert info["prompt"] == "own"
