"""Demonstrations for the warm start: sloppy agents at the real desk, written by the real chat format.

Invariants
- The token ids are built as the agent loop builds them (initial ids, the turn, its observation), so supervised learning
  sees exactly the format that reinforcement learning samples in.
- The tasks come from the far end of the training split: the held-out tasks, and the tasks a run trains on first, are
  not among them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.environments.base import Environment
from megatron_async.rollout.environments.desk import DeskTasks
from megatron_async.rollout.environments.desk_agents import SLOPPY, Script, Sloppiness, script
from megatron_async.rollout.environments.desk_policy import POLICIES, DeskPolicy, policy_from


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One recorded episode: ids, True where the agent produced the token, and the episode's reward."""

    token_ids: list[int]
    loss_mask: list[bool]
    reward: float


def demonstrations(
    count: int,
    seed: int,
    chat: ChatFormat,
    sloppiness: Sloppiness = SLOPPY,
    policy: DeskPolicy = POLICIES["cancel_allowed"],
) -> list[tuple[list[int], list[bool]]]:
    """`count` pairs (token_ids, loss_mask) of equal length, by a sloppy agent.

    With the default sloppiness it succeeds in about 60 % of the tasks; without any, in all of them.
    """
    recorded = record(count, seed, chat, sloppiness, policy)
    return [(episode.token_ids, episode.loss_mask) for episode in recorded]


def build(
    options: Mapping[str, Any], count: int, seed: int, chat: ChatFormat
) -> list[tuple[list[int], list[bool]]]:
    """`demonstrations` for the environment options of a run."""
    return demonstrations(count, seed, chat, policy=policy_from(options.get("policy", "cancel_allowed")))


def record(
    count: int, seed: int, chat: ChatFormat, sloppiness: Sloppiness, policy: DeskPolicy
) -> list[Demonstration]:
    """`demonstrations` with their rewards."""
    tasks = DeskTasks("train", policy, seed)
    rng = random.Random(f"desk demonstrations {seed}")
    episodes: list[tuple[Script, Environment]] = []
    for number in range(count):
        desk = tasks.environment(tasks.task(tasks.size - 1 - number))
        episodes.append((script(desk.task.opening, policy, sloppiness.draw(rng)), desk))
    return asyncio.run(_record_all(episodes, chat))


async def _record_all(episodes: list[tuple[Script, Environment]], chat: ChatFormat) -> list[Demonstration]:
    return [await play(agent, environment, chat) for agent, environment in episodes]


async def play(agent: Script, environment: Environment, chat: ChatFormat) -> Demonstration:
    """One scripted episode through the chat format. The script must end when the environment does."""
    start = await environment.reset()
    ids = chat.initial_ids(start.messages, start.tools)
    mask = [False] * len(ids)
    turn = next(agent)
    while True:
        action = chat.assistant_ids(turn)
        ids += action
        mask += [True] * len(action)
        step = await environment.step(chat.parse(action))
        if step.done:
            break
        observation = chat.observation_ids(step.messages)
        ids += observation
        mask += [False] * len(observation)
        turn = agent.send(step.messages[-1].content)
    reward, _ = await environment.reward()
    await environment.close()
    return Demonstration(ids, mask, reward)
