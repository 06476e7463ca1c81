"""A sampler that says prepared turns in a chat format's own tokens, for episodes through the agent loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_async.rollout.agent_loop import run_episode
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.environments.base import AssistantTurn, Environment, Message, Task, TaskSource
from megatron_async.rollout.environments.desk_tokenizer import build_tokenizer
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.trajectory import SamplingParams, Status, Trajectory
from sglang_bridge import Generation, Span


class ScriptedAgent:
    """Says what it is given: assistant messages, or raw text; at most the turn's budget of tokens of it."""

    def __init__(self, chat: ChatFormat, turns: Iterable[Message | str]) -> None:
        self._chat, self._turns = chat, iter(turns)

    async def generate(self, input_ids: list[int], sampling: Any, **options: Any) -> Generation:
        said = next(self._turns)
        if isinstance(said, str):
            ids = [*self._chat._encode(said), self._chat.turn_end_id]
        else:
            ids = self._chat.assistant_ids(said)
        cut, ids = len(ids) > sampling.max_new_tokens, ids[: sampling.max_new_tokens]
        reason = "length" if cut else "stop"
        return Generation(ids, [-1.0] * len(ids), [Span(0, 0, len(ids))], reason, None, 0)


def check_episode(folder: Path, tasks: TaskSource, task: Task, said: Sequence[Message], limits: EpisodeLimits) -> None:
    """`said` on `task` through the agent loop: ids and mask are those of the conversation, and it ends with reward 1.

    folder: where a tokenizer is put.
    """
    build_tokenizer().save_pretrained(str(folder))
    chat = ChatFormat(folder)
    trajectory = Trajectory("t", task.task_id, "p", SamplingParams(max_new_tokens=1000))
    asyncio.run(run_episode(ScriptedAgent(chat, said), chat, tasks.environment(task), trajectory, limits))
    ids, mask = asyncio.run(expected_tokens(chat, tasks.environment(task), said))
    assert trajectory.token_ids.tolist() == ids
    assert trajectory.loss_mask.tolist() == mask
    assert (trajectory.status, trajectory.reward, trajectory.info["ending"]) == (Status.OK, 1.0, "done")


async def expected_tokens(
    chat: ChatFormat, environment: Environment, turns: Iterable[Message]
) -> tuple[list[int], list[bool]]:
    """(ids, mask) of the episode by what the environment itself says to these turns, without the agent loop."""
    start = await environment.reset()
    ids = chat.initial_ids(start.messages, start.tools)
    mask = [False] * len(ids)
    for said in turns:
        spoken = chat.assistant_ids(said)
        ids, mask = ids + spoken, mask + [True] * len(spoken)
        step = await environment.step(AssistantTurn(said.content, said.tool_calls))
        if step.done:
            break
        heard = chat.observation_ids(step.messages)
        ids, mask = ids + heard, mask + [False] * len(heard)
    await environment.close()
    return ids, mask
