"""A desk whose reward is also a mark for what was said, so that a policy that knows nothing still learns from it.

Without the marks every reward of an untrained or scripted policy is 0, no update is made, no version is published, and
a run under fire would show nothing about either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_async.rollout.environments import AssistantTurn, Split, Step, Task
from megatron_async.rollout.environments.desk import DeskEnvironment, DeskTasks
from megatron_async.rollout.environments.desk_options import build as build_desk

NAME = f"{__name__}:build"


class MarkedEpisode(DeskEnvironment):
    """Reward: the desk's, plus a mark in [0, 1) that is a function of all that was said."""

    _said_so_far = b""

    async def step(self, turn: AssistantTurn) -> Step:
        self._said_so_far = hashlib.blake2b(self._said_so_far + turn.content.encode(), digest_size=4).digest()
        return await super().step(turn)

    async def reward(self) -> tuple[float, dict[str, Any]]:
        reward, info = await super().reward()
        return reward + int.from_bytes(self._said_so_far[:4]) / 2**32, info


@dataclass(frozen=True)
class MarkedDesk(DeskTasks):
    def environment(self, task: Task) -> DeskEnvironment:
        plain = super().environment(task)
        return MarkedEpisode(plain.task)


def build(options: Mapping[str, Any], split: Split, seed: int) -> MarkedDesk:
    """The desk's tasks without options, marked."""
    plain = build_desk(options, split, seed)
    return MarkedDesk(split, plain.policy, seed)
