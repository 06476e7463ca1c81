"""The full loop offline: agent loop, environment and a user behind an endpoint, many at once, with what goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_async.rollout import chat_endpoint
from megatron_async.rollout.agent_loop import run_episode
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.environments.base import Message, ToolCall
from megatron_async.rollout.environments.desk_tokenizer import build_tokenizer
from megatron_async.rollout.environments.tau2.episode import Said
from megatron_async.rollout.environments.tau2.users import ASKING, CLOSING, STOP
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.trajectory import SamplingParams, Status, Trajectory
from tests.unit.chat_endpoint import ChatServer, call, text
from tests.unit.scripted_agent import ScriptedAgent
from tests.unit.tau2_support import altered, requires_tau2, sample_ids
from tests.unit.test_tau2_episode import environment_of, source_of

pytestmark = requires_tau2

MALFORMED = '<tool_call>\n{"name": "x", "arguments": \n</tool_call>'
LIMITS = EpisodeLimits(max_turns=60, max_tokens=400_000, turn_deadline_s=200, trajectory_deadline_s=250)
BUDGET = 4096


def obedient_user(body: dict[str, Any]) -> dict[str, Any]:
    """A user model that understands the gold agent's phrases."""
    heard = body["messages"][-1]
    if heard["role"] == "tool":
        return text("I did it.")
    if heard["content"].startswith(ASKING):
        wish = json.loads(heard["content"][len(ASKING) :])
        return call(wish["name"], wish["arguments"])
    return text(STOP if heard["content"].startswith(CLOSING) else "Help me.")


def options(server: ChatServer, **more: Any) -> dict[str, Any]:
    return {"kind": "endpoint", "endpoint": {"url": server.url, "timeout_s": 60, "concurrency": 8, **more}}


def variants(gold: list[Said]) -> dict[str, list[Said | str]]:
    """What ten agents say on one task's gold actions, by what is the matter with them."""
    spoken = [Said("One moment.", said.calls) if said.calls and not said.content else said for said in gold]
    return {
        **{f"gold {number}": [*gold] for number in range(7)},
        "malformed": [MALFORMED],
        "unknown tool": [Said(calls=(("no_such_tool", {}),)), *gold],
        "text beside calls": [*spoken],
    }


async def play(chat: ChatFormat, environment: Any, turns: Iterable[Said | str], name: str) -> Trajectory:
    trajectory = Trajectory(name, "g", name, SamplingParams(1.0, 1.0, -1, BUDGET), {})
    spoken = [said if isinstance(said, str) else message(said) for said in turns]
    return await run_episode(ScriptedAgent(chat, spoken), chat, environment, trajectory, LIMITS)


def message(said: Said) -> Message:
    calls = tuple(ToolCall(name, arguments) for name, arguments in said.calls)
    return Message("assistant", said.content, calls)


def test_thirty_two_episodes_at_once_in_three_domains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gold ends with 1 whatever the user's hiccups; mistakes cost what they cost; a user that is gone is no reward."""
    monkeypatch.setattr(chat_endpoint, "_FIRST_PAUSE_S", 0.005)
    build_tokenizer().save_pretrained(str(tmp_path))
    chat = ChatFormat(tmp_path)

    async def episodes(server: ChatServer) -> dict[str, Trajectory]:
        runs = {}
        async with server:
            for domain in ("airline", "retail", "telecom"):
                source = source_of(domain, user=options(server))
                task_id = sample_ids(domain, 1)[0]
                gold = altered(source.context.domain.tasks[task_id], "gold", False)
                for kind, turns in variants(gold).items():
                    name = f"{domain}: {kind}"
                    runs[name] = play(chat, environment_of(source, task_id), turns, name)
            endless = environment_of(source, task_id)
            runs["over-long"] = play(chat, endless, ["words " * BUDGET], "over-long")
            gone = source_of("retail", user=options(server, url="http://127.0.0.1:9/v1", retries=1))
            runs["gone"] = play(chat, environment_of(gone, "0"), [], "gone")
            return dict(zip(runs, await asyncio.gather(*runs.values())))

    server = ChatServer(obedient_user, lambda request: 503 if request % 7 == 3 else None)
    played = asyncio.run(episodes(server))
    assert len(played) == 32
    for name, trajectory in played.items():
        check_outcome(name.split(": ")[-1], trajectory)
    assert server.most_running <= 8 * 3


def check_outcome(kind: str, trajectory: Trajectory) -> None:
    info = trajectory.info.get("reward", {})
    if kind == "gone":
        assert (trajectory.status, trajectory.reward) == (Status.ENVIRONMENT_ERROR, None)
        assert "127.0.0.1:9" in trajectory.info["failure"]
    elif kind == "over-long":
        assert (trajectory.status, trajectory.reward) == (Status.TRUNCATED, 0.0)
        assert (trajectory.info["ending"], info["termination"]) == ("max_new_tokens", "cut")
        assert trajectory.num_action_tokens == BUDGET
    elif kind == "malformed":
        assert (trajectory.status, trajectory.reward, info["termination"]) == (Status.OK, 0.0, "agent_error")
        assert "not JSON" in info["parse_error"]
    else:
        assert (trajectory.status, trajectory.reward) == (Status.OK, 1.0), kind
        assert info["tool_errors"] == (kind == "unknown tool")
        assert info["user_tokens"][0] > 0
