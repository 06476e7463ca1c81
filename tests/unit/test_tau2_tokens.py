"""Token exactness of long tau2 episodes through the agent loop, with and without thinking."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.rollout.agent_loop import run_episode
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.environments.base import Message, ToolCall
from megatron_async.rollout.environments.desk_tokenizer import build_tokenizer
from megatron_async.rollout.environments.tau2.episode import Said
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.trajectory import SamplingParams, Trajectory
from sglang_bridge import Generation, Span
from tests.unit.tau2_support import altered, requires_tau2, sample_ids
from tests.unit.test_tau2_episode import environment_of, source_of

pytestmark = requires_tau2


class TurnSampler:
    """Generates the ids of given turns, one turn a request, and remembers what it was sent."""

    def __init__(self, chat: ChatFormat, turns: list[Said], thinking: bool) -> None:
        self._chat = chat
        self._turns = iter(turns)
        self._thinking = thinking
        self.requests: list[list[int]] = []
        self.answers: list[list[int]] = []

    async def generate(self, input_ids: list[int], sampling: Any, **options: Any) -> Generation:
        number = len(self.requests)
        said = next(self._turns)
        calls = tuple(ToolCall(name, arguments) for name, arguments in said.calls)
        thought = f"thought {number}" if self._thinking else ""
        ids = self._chat.assistant_ids(Message("assistant", said.content, calls, thought))
        self.requests.append(list(input_ids))
        self.answers.append(ids)
        logprobs = [-0.5 * (number + 1)] * len(ids)  # exact in float32
        return Generation(ids, logprobs, [Span(number, 0, len(ids))], "stop", None, 0)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["retail", "telecom"])
def test_thirty_turns_append_and_align(name: str, thinking: bool, tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(str(tmp_path))
    chat = ChatFormat(tmp_path)
    source = source_of(name)
    task_id = sample_ids(name, 1)[0]
    gold = altered(source.context.domain.tasks[task_id], "gold", False)
    looking = {
        "retail": ("list_all_product_types", {}),
        "telecom": ("get_customer_by_id", {"customer_id": "C1001"}),
    }
    turns = [Said(calls=(looking[name],))] * (30 - len(gold)) + gold
    sampler = TurnSampler(chat, turns, thinking)
    trajectory = Trajectory("t", "g", task_id, SamplingParams(1.0, 1.0, -1, 4096), {})
    limits = EpisodeLimits(max_turns=40, max_tokens=200_000, turn_deadline_s=60, trajectory_deadline_s=120)
    asyncio.run(run_episode(sampler, chat, environment_of(source, task_id), trajectory, limits))

    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 30)
    ids = trajectory.token_ids.tolist()
    mask = np.zeros(len(ids), bool)
    for number, (request, answer) in enumerate(zip(sampler.requests, sampler.answers, strict=True)):
        start = len(request)
        assert ids[: start + len(answer)] == request + answer
        mask[start : start + len(answer)] = True
        assert (trajectory.rollout_logprobs[start : start + len(answer)] == -0.5 * (number + 1)).all()
        assert (trajectory.versions[start : start + len(answer)] == number).all()
    assert (trajectory.loss_mask == mask).all()
    assert np.isnan(trajectory.rollout_logprobs[~mask]).all()
    thoughts = sum("thought" in chat.text(answer) for answer in sampler.answers)
    assert thoughts == (30 if thinking else 0)
