"""The telecom technician solves tickets from what it observes, and its demonstrations are token-exact."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.schema import EnvironmentConfig
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.environments import build_demonstrations
from megatron_async.rollout.environments.desk_tokenizer import build_tokenizer
from megatron_async.rollout.environments.tau2 import telecom_teacher
from tests.unit.tau2_support import as_turn, requires_tau2
from tests.unit.test_tau2_episode import source_of

pytestmark = requires_tau2


def solve(environment: Any) -> float:
    """Play the technician on messages, without tokens."""
    agent = telecom_teacher.technician(environment.episode.task.ticket)

    async def run() -> float:
        await environment.reset()
        turn = next(agent)
        while True:
            step = await environment.step(_turn(turn))
            if step.done:
                break
            turn = agent.send(step.messages[-1].content)
        reward, _ = await environment.reward()
        return float(reward)

    return asyncio.run(run())


def _turn(message: Any) -> Any:
    from megatron_async.rollout.environments.tau2.episode import Said

    return as_turn(Said(message.content, tuple((call.name, call.arguments) for call in message.tool_calls)))


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_technician_solves_tickets_of_both_splits(stride: int) -> None:
    for split in ("train", "test"):
        source = source_of("telecom", solo=True, heldout_split=split, verify_official=0.0)
        chosen = [source.task(i) for i in range(0, source.size, stride)]
        rewards = {task.data["id"]: solve(source.environment(task)) for task in chosen}
        assert [task for task, reward in rewards.items() if reward < 1.0] == []


def test_technician_needs_a_phone_number() -> None:
    with pytest.raises(ValueError, match="names no phone number"):
        next(telecom_teacher.technician("My phone is broken."))


def test_demonstrations_are_the_chat_formats_own_ids(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(str(tmp_path))
    chat = ChatFormat(tmp_path)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Work the ticket. {ticket}")
    options = {
        "domain": "telecom",
        "solo": True,
        "system_prompt_file": str(prompt),
        "tool_descriptions": "short",
    }
    pairs = build_demonstrations(EnvironmentConfig("tau2", options), 3, 0, chat)
    assert len(pairs) == 3
    for ids, mask in pairs:
        assert len(ids) == len(mask)
        borders = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]]
        actions = [chat.parse(ids[a:b]) for a, b in zip(borders[::2], [*borders[1::2], len(ids)])]
        assert [call.name for turn in actions for call in turn.tool_calls][-1] == "done"
        assert all(turn.parse_error is None for turn in actions)


def test_other_domains_have_no_demonstrations(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(str(tmp_path))
    options = {"domain": "retail", "user": {"kind": "scripted"}}
    with pytest.raises(ValueError, match="telecom in solo mode"):
        build_demonstrations(EnvironmentConfig("tau2", options), 1, 0, ChatFormat(tmp_path))
