"""Demonstrations for the warm start on telecom tickets (solo mode), played in the real environment.

Invariants
- Ids are built as the agent loop builds them, and the mask covers exactly what the technician says.
- Tasks come from the training split only. Episodes that fail are left out: what is demonstrated works.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.environments.desk_demonstrations import Demonstration, play
from megatron_async.rollout.environments.tau2.environment import Tau2Tasks
from megatron_async.rollout.environments.tau2.options import parse
from megatron_async.rollout.environments.tau2.telecom_teacher import technician


def build(
    options: Mapping[str, Any], count: int, seed: int, chat: ChatFormat
) -> list[tuple[list[int], list[bool]]]:
    """Up to `count` pairs (token_ids, action_mask), one per training task and in an order drawn by `seed`.

    Raises ValueError for another domain than telecom, or without solo mode: nobody demonstrates there.
    """
    parsed = parse(options)
    if not parsed.solo or not parsed.domain.startswith("telecom"):
        raise ValueError(
            f"tau2: demonstrations exist for telecom in solo mode, not for domain={parsed.domain}, solo={parsed.solo}"
        )
    episodes = asyncio.run(record(Tau2Tasks(parsed, "train", seed), count, seed, chat))
    return [(episode.token_ids, episode.loss_mask) for episode in episodes if episode.reward >= 1.0]


async def record(tasks: Tau2Tasks, count: int, seed: int, chat: ChatFormat) -> list[Demonstration]:
    """The technician on `count` tasks (all, if there are fewer), with the rewards it got."""
    order = random.Random(f"tau2 demonstrations {seed}").sample(range(tasks.size), min(count, tasks.size))
    recorded = []
    for index in order:
        environment = tasks.environment(tasks.task(index))
        recorded.append(await play(technician(environment.episode.task.ticket), environment, chat))
    return recorded
