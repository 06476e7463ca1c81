"""The advantage estimators of the configuration, on one interface.

Invariants:
- Groups are found by `group_id`; order and size of groups change nothing.
- A lone sample follows the declared `singleton` policy; it never silently gets 0 or its raw reward.
- A failure is not a reward: a reward of None or NaN raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron_async.advantages.groups import all_equal, centred, leave_one_out, standardised
from megatron_async.advantages.running import EVERYTHING, RunningMean
from megatron_async.config.methods import ADVANTAGES, resolve_advantage
from megatron_async.config.schema import AdvantageConfig

GroupBaseline = Callable[[Sequence[float]], list[float]]


class AdvantageError(ValueError):
    """Rewards from which no advantage can be computed; the message names the trajectory or group."""


def group_indices(group_ids: Sequence[str]) -> dict[str, list[int]]:
    """Positions of each group's members, in order of first appearance."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    return members


def informative_groups(rewards: Sequence[float], group_ids: Sequence[str]) -> set[str]:
    """Groups whose rewards differ. DAPO's dynamic sampling drops the others and draws more in their place."""
    return {
        group
        for group, indices in group_indices(group_ids).items()
        if not all_equal([rewards[index] for index in indices])
    }


class AdvantageEstimator:
    """Called once per batch with one reward per trajectory; keeps the running baselines between batches."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = resolve_advantage(config)
        if ADVANTAGES[self.config.name].needs_critic:
            raise AdvantageError(
                f"advantage {self.config.name!r} gives every token its own advantage from a critic's values: use "
                "gae_targets"
            )
        window = self.config.window or ADVANTAGES["running_mean"].window
        assert window is not None, "config.methods gives running_mean a window"
        self._running = RunningMean(window)
        self._group_baseline = self._choose_group_baseline()

    def _choose_group_baseline(self) -> GroupBaseline | None:
        if self.config.name == "grpo":
            return standardised if self.config.normalise_std else centred
        return {"dr_grpo": centred, "rloo": leave_one_out}.get(self.config.name)

    @property
    def needs_prompts(self) -> bool:
        """Whether `prompt_ids` must be given."""
        grouped = self._group_baseline is not None
        return self.config.name == "running_mean" or (grouped and self.config.singleton == "running_mean")

    def __call__(
        self, rewards: Sequence[float], group_ids: Sequence[str], prompt_ids: Sequence[str] | None = None
    ) -> list[float]:
        """One advantage per trajectory.

        rewards, group_ids: one entry per trajectory, in any order. prompt_ids: identity of the prompt across groups,
        for baselines per prompt. Raises AdvantageError for lengths that differ, a missing or non-finite reward, or a
        lone sample under `singleton: error`.
        """
        self._check(rewards, group_ids, prompt_ids)
        keys = [EVERYTHING] * len(rewards) if prompt_ids is None else list(prompt_ids)
        if self._group_baseline is not None:
            advantages = self._grouped(rewards, group_ids, keys, self._group_baseline)
        elif self.config.name == "batch_mean":
            advantages = (standardised if self.config.normalise_std else centred)(rewards) if rewards else []
        else:
            if self.config.name == "latest_mean":
                keys = [EVERYTHING] * len(rewards)
            advantages = [self._against_history(index, rewards, keys) for index in range(len(rewards))]
        self._running.extend(keys, rewards)
        return advantages

    def _check(
        self, rewards: Sequence[float], group_ids: Sequence[str], prompt_ids: Sequence[str] | None
    ) -> None:
        if len(rewards) != len(group_ids) or (prompt_ids is not None and len(prompt_ids) != len(rewards)):
            prompts = "no" if prompt_ids is None else len(prompt_ids)
            raise AdvantageError(f"{len(rewards)} rewards, {len(group_ids)} group ids, {prompts} prompt ids")
        if self.needs_prompts and prompt_ids is None:
            raise AdvantageError(
                f"advantage {self.config.name!r} (singleton {self.config.singleton!r}) compares with the latest "
                "rewards of the same prompt: prompt_ids must be given"
            )
        for index, reward in enumerate(rewards):
            if reward is None or not math.isfinite(reward):
                raise AdvantageError(
                    f"trajectory {index} of group {group_ids[index]!r} has reward {reward}; trajectories without a "
                    "reward (failed or aborted) must be left out of the batch"
                )

    def _grouped(
        self, rewards: Sequence[float], group_ids: Sequence[str], keys: Sequence[str], baseline: GroupBaseline
    ) -> list[float]:
        advantages = [0.0] * len(rewards)
        for group, indices in group_indices(group_ids).items():
            if len(indices) == 1:
                advantages[indices[0]] = self._lone(group, indices[0], rewards, keys)
                continue
            values = baseline([rewards[index] for index in indices])
            for index, value in zip(indices, values, strict=True):
                advantages[index] = value
        return advantages

    def _lone(self, group: str, index: int, rewards: Sequence[float], keys: Sequence[str]) -> float:
        if self.config.singleton == "zero":
            return 0.0
        if self.config.singleton == "running_mean":
            return self._against_history(index, rewards, keys)
        raise AdvantageError(
            f"group {group!r} has one trajectory, which {self.config.name!r} cannot compare with anything; set "
            "advantage.singleton to 'zero' or 'running_mean', or use groups of at least 2"
        )

    def _against_history(self, index: int, rewards: Sequence[float], keys: Sequence[str]) -> float:
        """reward - mean of what the key gave before; for a new key, - mean of the batch's other rewards."""
        baseline = self._running.mean(keys[index])
        if baseline is not None:
            return rewards[index] - baseline
        if len(rewards) == 1:
            raise AdvantageError(
                f"the batch is one trajectory (reward {rewards[0]}) and there is no earlier reward to compare it "
                "with; take more trajectories per batch"
            )
        others = math.fsum(rewards) - rewards[index]
        return rewards[index] - others / (len(rewards) - 1)

    def state_dict(self) -> dict[str, Any]:
        """The running baselines, for a checkpoint."""
        return self._running.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._running.load_state_dict(state)


def build_advantage(config: AdvantageConfig) -> AdvantageEstimator:
    """The estimator that `config` names. Raises ConfigError for an unknown name, with the nearest legal one."""
    return AdvantageEstimator(config)
