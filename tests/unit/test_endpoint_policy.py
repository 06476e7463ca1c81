"""A policy behind a chat endpoint: what is sent, whose mistakes count as what, resumption, and the whole command."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async import cli
from megatron_async.errors import UserError
from megatron_async.evaluate import EvaluatedPolicy
from megatron_async.rollout import chat_endpoint
from megatron_async.rollout.chat_endpoint import ChatEndpoint, EndpointOptions, _read
from megatron_async.rollout.endpoint_policy import endpoint_player
from megatron_async.rollout.environments.base import (
    AssistantTurn,
    EnvironmentFailure,
    Message,
    Start,
    Step,
    Task,
)
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.rollout.evaluation_episode import EvaluatedEpisode
from sglang_bridge.event_loop import BackgroundLoop
from tests.unit.chat_endpoint import ChatServer, call, text
from tests.unit.test_bridge_fuzz import JUNK, at, places

LIMITS = EpisodeLimits(max_turns=3, max_tokens=200, turn_deadline_s=120.0, trajectory_deadline_s=240.0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "_FIRST_PAUSE_S", 0.005)


class Recorder:
    """An environment that answers each call with "result", ends after a text, and remembers the turns.

    fails_at: "reset" fails; "close" raises; "step" never answers; "observation": it answers nothing.
    """

    def __init__(self, fails_at: str = "") -> None:
        self.turns: list[AssistantTurn] = []
        self.closed = False
        self._fails_at = fails_at

    async def reset(self) -> Start:
        if self._fails_at == "reset":
            raise EnvironmentFailure("down")
        return Start([Message("system", "Be kind."), Message("user", "hello")], [{"type": "function"}])

    async def step(self, turn: AssistantTurn) -> Step:
        self.turns.append(turn)
        if self._fails_at == "step":
            await asyncio.sleep(3600)
        if turn.parse_error or not turn.tool_calls:
            return Step([], done=True)
        if self._fails_at == "observation":
            return Step([], done=False)
        return Step([Message("tool", f"result of {c.name}") for c in turn.tool_calls], done=False)

    async def reward(self) -> tuple[float, dict[str, Any]]:
        return float(not any(turn.parse_error for turn in self.turns)), {"why": "because"}

    async def close(self) -> None:
        self.closed = True
        if self._fails_at == "close":
            raise RuntimeError("the database is gone")


class OneTask:
    split = "heldout"
    size = 1

    def __init__(self, environment: Recorder) -> None:
        self.made = environment

    def task(self, index: int) -> Task:
        return Task(f"task-{index}", {})

    def environment(self, task: Task) -> Recorder:
        return self.made


def play(
    rule: Callable[[dict[str, Any]], dict[str, Any]],
    environment: Recorder | None = None,
    fail: Any = None,
    limits: EpisodeLimits = LIMITS,
    usage: tuple[int, int] | None = (7, 3),
) -> tuple[EvaluatedEpisode, ChatServer, Recorder]:
    environment = environment or Recorder()
    server = ChatServer(rule, fail or (lambda request: None), usage)

    async def run() -> EvaluatedEpisode:
        async with server:
            options = EndpointOptions(server.url, retries=1, timeout_s=120.0)
            source: Any = OneTask(environment)
            return await endpoint_player(ChatEndpoint(options), source, limits)(source.task(0), "0")

    return asyncio.run(run()), server, environment


def test_results_return_under_the_id_of_their_call() -> None:
    answers = iter([call("look", {"x": 1}), text("Done.")])
    episode, server, environment = play(lambda body: next(answers))
    assert (episode.reward, episode.ending, episode.turns, episode.tokens) == (1.0, "done", 2, 6)
    assert (episode.versions, episode.info) == (None, {"why": "because"})
    first, second = server.bodies
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert first["tools"] == [{"type": "function"}]
    said, heard = second["messages"][2:]
    assert said["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"x": 1}'}
    assert heard == {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "result of look"}
    assert environment.closed


def test_functions_added_later_are_in_the_tools_from_then_on() -> None:
    class Adding(Recorder):
        async def step(self, turn: AssistantTurn) -> Step:
            step = await super().step(turn)
            return replace(step, added_tools=[{"type": "function", "number": len(self.turns)}])

    answers = iter([call("look", {}), call("look", {}), text("Done.")])
    _, server, _ = play(lambda body: next(answers), Adding())
    first, *added = [{"type": "function"}, *({"type": "function", "number": n} for n in (1, 2))]
    assert [body["tools"] for body in server.bodies] == [[first], [first, added[0]], [first, *added]]


@pytest.mark.parametrize("answer", [call("look", "{not json"), call("look", "[1]"), text("  ")])
def test_a_malformed_turn_is_the_policys_and_is_not_asked_for_again(answer: dict[str, Any]) -> None:
    episode, server, environment = play(lambda body: answer)
    assert (episode.reward, episode.failed, len(server.bodies)) == (0.0, False, 1)
    assert environment.turns[0].parse_error


def test_limits_cut_and_count_as_cut() -> None:
    episode, _, _ = play(lambda body: call("look", {}))
    assert (episode.ending, episode.truncated, episode.turns) == ("max_turns", True, 3)
    episode, _, environment = play(lambda body: {**text("endless"), "cut": True})
    assert (episode.ending, episode.truncated, environment.turns) == ("max_new_tokens", True, [])


def test_failures_are_no_answers() -> None:
    episode, server, environment = play(lambda body: text("x"), fail=lambda request: 503)
    assert (episode.failed, episode.ending, len(server.bodies)) == (True, "endpoint_failure", 2)
    assert environment.closed
    episode, _, environment = play(lambda body: text("x"), Recorder("reset"))
    assert (episode.failed, episode.ending, environment.closed) == (True, "environment_failure", True)


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens",  # OpenAI, vLLM
        "The input (9000 tokens) is longer than the model's context length (8192 tokens).",  # SGLang
        "Requested token count exceeds the model's maximum context length of 8192 tokens.",  # SGLang
        "the request exceeds the available context size. try increasing the context size",  # llama.cpp
        "prompt is too long: 208310 tokens > 200000 maximum",
        '{"code": "context_length_exceeded"}',
    ],
)
@pytest.mark.parametrize("answered", [0, 2])
def test_a_conversation_too_long_for_the_server_is_cut_and_counts(words: str, answered: int) -> None:
    """As for engines, whose trajectories are cut at `max_tokens`: left out, the long tasks would be missing."""
    episode, server, environment = play(
        lambda body: call("look", {}), fail=lambda request: (400, words) if request == answered else None
    )
    assert (episode.ending, episode.truncated, episode.failed) == ("context_length", True, False)
    assert (episode.reward, episode.info) == (1.0, {"why": "because"})  # what the environment says of a cut episode
    assert (episode.turns, len(environment.turns), len(server.bodies)) == (answered, answered, answered + 1)
    assert environment.closed


@pytest.mark.parametrize(
    ("status", "words", "answered", "cut"),
    [
        (400, "too many tokens were asked of length 3", 1, True),
        (400, "Invalid token in the grammar", 0, False),  # nothing has been answered: it may be the request itself
        (400, "unknown parameter: tool_choice", 1, False),
        (413, "Payload Too Large", 1, True),
        (413, "Payload Too Large", 0, False),
        (401, "invalid access token", 1, False),
    ],
)
def test_other_refusals_are_failures(status: int, words: str, answered: int, cut: bool) -> None:
    episode, _, _ = play(
        lambda body: call("look", {}), fail=lambda request: (status, words) if request == answered else None
    )
    assert (episode.ending, episode.failed) == (("context_length", False) if cut else ("endpoint_failure", True))


def test_a_server_that_does_not_state_tokens_is_told_of() -> None:
    """It can never reach `max_tokens`; the turns are counted, so that the report can say so."""
    small = replace(LIMITS, max_tokens=10)
    episode, _, _ = play(lambda body: call("look", {}), limits=small)
    assert (episode.ending, episode.turns, episode.unmetered) == ("max_tokens", 1, 0)
    episode, _, _ = play(lambda body: call("look", {}), limits=small, usage=None)
    assert (episode.ending, episode.turns, episode.tokens, episode.unmetered) == ("max_turns", 3, 0, 3)


def test_an_environment_that_cannot_close_keeps_its_outcome() -> None:
    episode, _, environment = play(lambda body: text("Done."), Recorder("close"))
    assert (episode.reward, episode.ending, environment.closed) == (1.0, "done", True)


@pytest.mark.parametrize(("fails_at", "kind"), [("step", "environment_timeout"), ("observation", "no_observation")])
def test_an_environment_that_does_not_answer_fails_the_episode(fails_at: str, kind: str) -> None:
    hasty = replace(LIMITS, turn_deadline_s=0.5)
    episode, _, environment = play(lambda body: call("look", {}), Recorder(fails_at), limits=hasty)
    assert (episode.failed, episode.ending, environment.closed) == (True, kind, True)


def write_config(folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(
        "name: r\nmodel: {path: none}\nlayout: {world_size: 1}\nenvironment: {name: desk}\n"
        f"run_dir: {folder}\nevaluation: {{tasks: 3, samples_per_task: 2}}\n"
    )
    return path


def command(config: Path, server: ChatServer) -> int:
    """The command in this thread, as signals want it; the server in another."""
    loop = BackgroundLoop("server")
    try:
        loop.submit(server.__aenter__()).result(120)
        arguments = ["--config", str(config), "--endpoint", server.url, "--endpoint-model", "a/b"]
        return cli.main(["evaluate", *arguments])
    finally:
        loop.submit(server.__aexit__()).result(120)
        loop.close()


def test_command_writes_results_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ChatServer(lambda body: text("I refuse."))
    assert command(write_config(tmp_path), server) == 0
    written = json.loads((tmp_path / "r/evaluation/a-b/desk/evaluation.json").read_text())
    assert (written["tasks"], written["episodes"], written["versions"]) == (3, 6, None)
    assert set(written["pass_hat"]) == set(written["pass_at_95"]) == {"1", "2"}
    assert written["pass_hat_95"]["2"][0] == 0.0 < written["pass_hat_95"]["2"][1]
    assert "| k | pass^k | 95 % interval | pass@k |" in capsys.readouterr().out
    assert server.bodies[0]["model"] == "a/b"
    assert not (tmp_path / "r/evaluations.jsonl").exists()


    assert (written["left_out"], written["short_tasks"]) == (0, 0)
    page = (tmp_path / "r/evaluation/a-b/desk/evaluation.md").read_text()
    assert f"Evaluated: endpoint, model a/b, from {server.url}." in page
    assert "temperature 1.0" in page and "max_turns " in page and "Episodes left out: 0." in page


def test_an_endpoint_that_refuses_every_prompt_for_its_length_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zero success everywhere would say something of the policy; this says something of the server's options."""
    server = ChatServer(lambda body: text("x"), fail=lambda request: (400, "maximum context length is 16 tokens"))
    assert command(write_config(tmp_path), server) == 2
    assert "refused the first request of every episode" in capsys.readouterr().err
    assert not (tmp_path / "r/evaluation/a-b/desk/evaluation.json").exists()


def test_a_single_task_has_no_standard_error_and_its_json_is_json(tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise ValueError(word)

    config = write_config(tmp_path)
    config.write_text(config.read_text().replace("tasks: 3", "tasks: 1"))
    assert command(config, ChatServer(lambda body: text("No."), usage=None)) == 0
    written = (tmp_path / "r/evaluation/a-b/desk/evaluation.json").read_text()
    assert json.loads(written, parse_constant=refuse)["stderr"] is None
    page = (tmp_path / "r/evaluation/a-b/desk/evaluation.md").read_text()
    assert "The endpoint did not say how many tokens 4 turns took" in page


def test_policies_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose one"):
        EvaluatedPolicy(checkpoint=tmp_path, endpoint="http://x")
    with pytest.raises(UserError, match="no Hugging Face checkpoint"):
        EvaluatedPolicy(checkpoint=tmp_path)


def test_an_answer_with_any_part_replaced_by_junk_is_read_or_refused() -> None:
    """What is refused is asked for again; any other exception would end the evaluation, or the episode as a bug."""
    look = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": "well", "tool_calls": [look]}
    whole: dict[str, Any] = {
        "choices": [{"message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }
    for path in places(whole):
        for junk in JUNK:
            damaged = copy.deepcopy(whole)
            at(damaged, path[:-1])[path[-1]] = junk
            with contextlib.suppress(ValueError):
                read = _read(json.dumps(damaged))
                assert isinstance(read.content, str) and type(read.prompt_tokens) is int
