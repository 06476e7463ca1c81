"""What the agents do: episodes as turns of the policy with tools between them.

Invariants: an episode has at least one turn; drawing is deterministic by the generator given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_async.simulation.errors import ScenarioError


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. context: tokens added before it (prompt or observation). actions: tokens the policy samples.
    tool_seconds: what the environment takes after it (before the next turn, or for the reward)."""

    context: int
    actions: int
    tool_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Episode:
    """One trajectory's shape. reset_seconds: what the environment takes before the first turn."""

    turns: tuple[Turn, ...]
    reset_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("an episode has at least one turn")

    @property
    def actions(self) -> int:
        """Tokens the policy samples."""
        return sum(turn.actions for turn in self.turns)

    @property
    def tokens(self) -> int:
        """All tokens, context included."""
        return self.actions + sum(turn.context for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Workload:
    """A stock of groups of episodes. Members of one prompt are often alike, so they are drawn from one group of the
    stock; a single large group makes members independent."""

    groups: tuple[tuple[Episode, ...], ...]

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups):
            raise ValueError("a workload needs at least one group, and every group an episode")

    def group(self, size: int, random: np.random.Generator) -> list[Episode]:
        """The episodes of one prompt's group: one of the stock as it is where the size fits, else drawn from it."""
        members = self.groups[int(random.integers(0, len(self.groups)))]
        if len(members) == size:
            return list(members)
        return [members[int(i)] for i in random.integers(0, len(members), size)]

    @property
    def episodes(self) -> list[Episode]:
        """All episodes of the stock."""
        return [episode for group in self.groups for episode in group]

    @property
    def mean_actions(self) -> float:
        return float(np.mean([episode.actions for episode in self.episodes]))

    @classmethod
    def parametric(
        cls,
        *,
        turns: float,
        actions_per_turn: float,
        actions_spread: float,
        prompt: int,
        observation: int,
        tool_seconds: float,
        tool_spread: float = 0.0,
        stock: int = 2000,
        seed: int = 0,
    ) -> Workload:
        """Episodes with geometric numbers of turns (mean `turns`) and log-normal lengths and tool latencies.

        actions_spread, tool_spread: standard deviation of the logarithm; means are `actions_per_turn` and
        `tool_seconds`. For planning without a run to calibrate from.

        Raises ScenarioError for fewer than one turn, or a number below 0.
        """
        numbers = (actions_per_turn, actions_spread, prompt, observation, tool_seconds, tool_spread)
        if not 1 <= turns < math.inf or not all(0 <= number < math.inf for number in numbers):
            raise ScenarioError("workload: the mean of turns is at least 1, and nothing may be below 0 or infinite")
        random = np.random.default_rng(seed)

        def lognormal(mean: float, spread: float) -> float:
            return mean * float(np.exp(spread * random.standard_normal() - spread**2 / 2)) if mean else 0.0

        def episode() -> Episode:
            count = int(random.geometric(1.0 / turns))
            return Episode(tuple(
                Turn(prompt if i == 0 else observation, max(1, round(lognormal(actions_per_turn, actions_spread))),
                     lognormal(tool_seconds, tool_spread))
                for i in range(count)
            ))  # fmt: skip

        return cls((tuple(episode() for _ in range(stock)),))


def constant(actions: int, context: int = 0, tool_seconds: float = 0.0) -> Workload:
    """One kind of episode only: a single turn."""
    return Workload(((Episode((Turn(context, actions, tool_seconds),)),),))


def maximum_over_mean(lengths: Sequence[float], group_size: int) -> float:
    """M = E[max of `group_size` lengths] / E[length], members independent."""
    ordered = np.sort(np.asarray(lengths, dtype=float))
    ranks = np.arange(1, len(ordered) + 1) / len(ordered)
    weights = ranks**group_size - (ranks - 1 / len(ordered)) ** group_size
    return float(weights @ ordered / ordered.mean())
