"""A policy behind a chat endpoint: what is sent, whose mistakes count as what, resumption, and the whole command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_async import cli
from megatron_async.errors import UserError
from megatron_async.evaluate import EvaluatedPolicy
from megatron_async.rollout import chat_endpoint
from megatron_async.rollout.chat_endpoint import ChatEndpoint, EndpointOptions
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

LIMITS = EpisodeLimits(max_turns=3, max_tokens=200, turn_deadline_s=120.0, trajectory_deadline_s=240.0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "_FIRST_PAUSE_S", 0.005)


class Recorder:
    """An environment that answers each call with "result", ends after a text, and remembers the turns."""

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
        if turn.parse_error or not turn.tool_calls:
            return Step([], done=True)
        return Step([Message("tool", f"result of {c.name}") for c in turn.tool_calls], done=False)

    async def reward(self) -> tuple[float, dict[str, Any]]:
        return float(not any(turn.parse_error for turn in self.turns)), {"why": "because"}

    async def close(self) -> None:
        self.closed = True


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
    rule: Callable[[dict[str, Any]], dict[str, Any]], environment: Recorder | None = None, fail: Any = None
) -> tuple[EvaluatedEpisode, ChatServer, Recorder]:
    environment = environment or Recorder()
    server = ChatServer(rule, fail or (lambda request: None))

    async def run() -> EvaluatedEpisode:
        async with server:
            options = EndpointOptions(server.url, retries=1, timeout_s=120.0)
            source: Any = OneTask(environment)
            return await endpoint_player(ChatEndpoint(options), source, LIMITS)(source.task(0), "0")

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
    written = json.loads((tmp_path / "r/evaluation/a-b/evaluation.json").read_text())
    assert (written["tasks"], written["episodes"], written["versions"]) == (3, 6, None)
    assert set(written["pass_hat"]) == {"1", "2"}
    assert "| k | pass^k | pass@k |" in capsys.readouterr().out
    assert server.bodies[0]["model"] == "a/b"
    assert not (tmp_path / "r/evaluations.jsonl").exists()


def test_policies_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose one"):
        EvaluatedPolicy(checkpoint=tmp_path, endpoint="http://x")
    with pytest.raises(UserError, match="no Hugging Face checkpoint"):
        EvaluatedPolicy(checkpoint=tmp_path)
