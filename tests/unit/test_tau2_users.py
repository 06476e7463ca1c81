"""User simulators and judges behind an endpoint: retries, limits, failures, and whole episodes against one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from megatron_async.rollout import chat_endpoint
from megatron_async.rollout.chat_endpoint import ChatEndpoint, EndpointError, EndpointOptions, well_formed
from megatron_async.rollout.environments.base import EnvironmentFailure
from megatron_async.rollout.environments.tau2.users import EndpointUser
from tests.unit.chat_endpoint import ChatServer, call, text
from tests.unit.tau2_support import altered, domain, play, requires_tau2, sample_ids
from tests.unit.test_tau2_episode import environment_of, source_of


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "_FIRST_PAUSE_S", 0.005)


async def ask(
    server: ChatServer, *, messages: list[dict[str, Any]] | None = None, tools: Any = (), **options: Any
) -> tuple[Any, int]:
    """(the answer, how often the request was sent again)."""
    chat = ChatEndpoint(EndpointOptions(url=server.url, **options))
    repeats: list[int] = []
    async with chat.session() as session:
        said = [*(messages or [text("hi")])]
        answer = await chat.complete(session, said, list(tools), well_formed, lambda: repeats.append(1))
    return answer, len(repeats)


def with_server(server: ChatServer, use: Callable[[ChatServer], Any]) -> Any:
    async def run() -> Any:
        async with server:
            return await use(server)

    return asyncio.run(run())


def test_answer_has_text_calls_and_tokens() -> None:
    tool = {"type": "function", "function": {"name": "t", "parameters": {}}}
    server = ChatServer(lambda body: {**call("t", {"x": 1}), "content": "now"})
    answer, _ = with_server(server, lambda s: ask(s, tools=[tool], sampling={"temperature": 0.5}))
    assert (answer.content, answer.calls) == ("now", (("t", {"x": 1}),))
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 3)
    assert server.bodies[0]["temperature"] == 0.5
    assert server.bodies[0]["tools"] == [tool]


@pytest.mark.parametrize("failure", [500, 503, 429, 408, "junk"])
def test_failures_that_may_pass_are_repeated(failure: int | str) -> None:
    server = ChatServer(lambda body: text("ok"), lambda request: failure if request < 2 else None)
    answer, repeats = with_server(server, lambda s: ask(s, timeout_s=60, retries=2))
    assert answer.content == "ok"
    assert (len(server.bodies), repeats) == (3, 2)


def test_no_answer_in_time_is_repeated() -> None:
    server = ChatServer(lambda body: text("ok"), lambda request: "hang" if request < 2 else None)
    # More repetitions than hangs: on a busy machine an honest answer may be late too.
    answer, repeats = with_server(server, lambda s: ask(s, timeout_s=0.3, retries=20))
    assert answer.content == "ok"
    assert repeats >= 2


def test_retries_are_bounded_and_the_error_says_what_was_last() -> None:
    server = ChatServer(lambda body: text("ok"), lambda request: 503)
    with pytest.raises(EndpointError, match="in 3 attempts; the last: .*503"):
        with_server(server, lambda s: ask(s, retries=2))
    assert len(server.bodies) == 3


def test_refused_request_is_not_repeated() -> None:
    server = ChatServer(lambda body: text("ok"), lambda request: 400)
    with pytest.raises(EndpointError, match="refuses the request: HTTP 400"):
        with_server(server, lambda s: ask(s, retries=5))
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "broken", [call("t", "{not json"), call("t", "[1]"), {"content": ["parts"]}, {"tool_calls": 3}]
)
def test_unreadable_answers_are_asked_for_again(broken: dict[str, Any]) -> None:
    answers = iter([broken, text("fine")])
    answer, _ = with_server(ChatServer(lambda body: next(answers)), lambda s: ask(s, retries=1))
    assert answer.content == "fine"


def test_no_more_requests_at_once_than_allowed() -> None:
    async def many(server: ChatServer) -> None:
        chat = ChatEndpoint(EndpointOptions(url=server.url, concurrency=3))
        async with chat.session() as session:
            await asyncio.gather(
                *(chat.complete(session, [text("hi")], [], lambda done: done) for _ in range(12))
            )

    server = ChatServer(lambda body: text("ok"))
    with_server(server, many)
    assert (len(server.bodies), server.most_running) == (12, 3)


def test_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    server = ChatServer(lambda body: text("ok"))
    with_server(server, lambda s: ask(s, api_key_env="SOME_KEY"))
    assert server.keys == {"Bearer secret"}
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ValueError, match="SOME_KEY .* is not set"):
        ChatEndpoint(EndpointOptions(url="x", api_key_env="SOME_KEY"))


SECRET = "<think>\nThe agent must not know: secret.\n</think>\n\n"


@pytest.mark.parametrize("thoughts", [SECRET, SECRET.replace("<think>", ""), ""])
def test_agent_hears_what_the_user_says_not_what_it_thinks(thoughts: str) -> None:
    said = with_server(ChatServer(lambda body: text(f"{thoughts}Hi, I need help")), hear)
    assert said.content == "Hi, I need help"


@pytest.mark.parametrize(
    "broken", [{**text("I want to canc"), "cut": True}, text(SECRET), text("<think>for ever"), text(" ")]
)
def test_user_that_was_cut_or_only_thought_is_asked_again_and_then_fails(broken: dict[str, Any]) -> None:
    answers = iter([broken, text("fine")])
    assert with_server(ChatServer(lambda body: next(answers)), hear).content == "fine"
    with pytest.raises(EnvironmentFailure, match="user simulator: .* in 2 attempts") as failure:
        with_server(ChatServer(lambda body: broken), hear)
    assert failure.value.kind == "user_failure"


async def hear(server: ChatServer) -> Any:
    user = EndpointUser(ChatEndpoint(EndpointOptions(url=server.url, retries=1)))
    try:
        return await user.answer([text("hello")], [])
    finally:
        await user.close()


@requires_tau2
def test_judge_decides_and_its_failure_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    place = domain("retail")
    task_id = sample_ids("retail", 1)[0]
    kind = place.package.RewardType
    judged = place.tasks[task_id].model_copy(deep=True)
    judged.evaluation_criteria.reward_basis = [kind("DB"), kind("NL_ASSERTION")]
    judged.evaluation_criteria.nl_assertions = ["The agent was polite."]
    monkeypatch.setitem(place.tasks, task_id, judged)
    with pytest.raises(ValueError, match=r"1 of 114 retail tasks need .* judge\.url"):
        source_of("retail")

    def verdict(met: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
        graded = [{"expectedOutcome": "x", "reasoning": "y", "metExpectation": met}]
        return lambda body: text(json.dumps({"results": graded}))

    async def reward(server: ChatServer) -> Any:
        source = source_of("retail", judge={"url": server.url, "retries": 1})
        return await play(environment_of(source, task_id), altered(judged, "gold", False))

    for met in (True, False):
        fail = lambda request, met=met: "junk" if met and request < 1 else None
        value, info = with_server(ChatServer(verdict(met), fail), reward)
        assert (value, info["breakdown"]["NL_ASSERTION"]) == (float(met), float(met))
        assert info["reward_basis"] == ["DB", "NL_ASSERTION"]
        assert info["judge_repeats"] == int(met)
    with pytest.raises(EnvironmentFailure, match="judge: .*no usable answer in 2 attempts") as failure:
        with_server(ChatServer(lambda body: text("maybe")), reward)
    assert failure.value.kind == "judge_failure"
