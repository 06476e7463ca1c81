"""An environment of one's own, by `package.module:factory`: every other episode is rewarded, whatever is said.

An untrained policy says nothing of use; so that a run on it has a learning signal in every step all the same, the
reward alternates between 0 and 1 from one episode to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from megatron_async.rollout.environments import AssistantTurn, Message, Split, Start, Step, Task

TURNS = 2


class AlternatingEnvironment:
    def __init__(self, reward: float) -> None:
        self._reward = reward
        self._turns = 0

    async def reset(self) -> Start:
        return Start([Message("system", "say something"), Message("user", "hello")], [])

    async def step(self, turn: AssistantTurn) -> Step:
        self._turns += 1
        done = self._turns == TURNS
        return Step([] if done else [Message("user", "go on")], done)

    async def reward(self) -> tuple[float, dict[str, Any]]:
        return self._reward, {}

    async def close(self) -> None:
        self._turns = TURNS


class AlternatingTasks:
    size = None

    def __init__(self, split: Split) -> None:
        self.split: Split = split
        self._episodes = itertools.count()

    def task(self, index: int) -> Task:
        return Task(f"{self.split}-{index}", {"index": index})

    def environment(self, task: Task) -> AlternatingEnvironment:
        return AlternatingEnvironment(float(next(self._episodes) % 2))


def build(options: Mapping[str, Any], split: Split, seed: int) -> AlternatingTasks:
    return AlternatingTasks(split)
