"""Who gets the credit: from a batch's rewards to the advantage of every token, by a baseline or by a critic.

Invariants: every rank computes the same advantages (it holds the whole batch); what a step learns besides the policy
is learned here, once per batch; a trajectory's reward is given out once, to its last action token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async.advantages import AdvantageEstimator, build_advantage, explained_variance
from megatron_async.advantages.targets import Episodes, Targets, gae_targets
from megatron_async.config.methods import ADVANTAGES
from megatron_async.config.schema import RunConfig
from megatron_async.engine.critic import Values
from megatron_async.engine.sequences import Sequence
from megatron_async.training.batch import with_array
from megatron_async.training.checkpointing import ModelFiles
from megatron_async.training.control import Control
from megatron_async.training.critics import (
    SharedCritic,
    ValueModel,
    ValueUpdate,
    build_critic,
    count_actions,
)
from megatron_async.training.remote_critic import RemoteCritic
from megatron_async.trajectory import Status, Trajectory

Stage = Callable[[str, int], AbstractContextManager[None]]
"""`Session.stage`: times and shows a block of work."""


class BaselineCredit:
    """One advantage per trajectory, from rewards alone (`AdvantageEstimator`)."""

    def __init__(self, config: RunConfig) -> None:
        self.estimator: AdvantageEstimator = build_advantage(config.advantage)
        self._drop = config.advantage.drop_zero_variance_groups

    def scalars(self, trajectories: SequenceOf[Trajectory]) -> tuple[list[float], list[int]]:
        """One advantage per trajectory, and the indices of those that enter the loss."""
        rewards = [trajectory.required_reward() for trajectory in trajectories]
        groups = [trajectory.group_id for trajectory in trajectories]
        advantages = self.estimator(rewards, groups, [trajectory.prompt_id for trajectory in trajectories])
        return advantages, [i for i, value in enumerate(advantages) if value != 0.0 or not self._drop]

    def holds_policy(self, step: int) -> bool:
        """Whether the policy is not updated in this step."""
        return False

    def assign(self, step: int, trajectories: list[Trajectory], sequences: list[Sequence]) -> list[Sequence]:
        """The sequences with their advantages; here they have them."""
        return sequences

    def learn(self, step: int) -> None:
        """What is learned after the policy's update."""

    def take_metrics(self) -> dict[str, Any]:
        """Metrics of the step, once."""
        return {}

    def save(self, path: Path) -> None:
        """Write what is learned besides the policy; collective."""

    def close(self) -> None:
        """Nothing more is assigned."""

    @property
    def parts(self) -> dict[str, BaselineCredit]:
        """What a checkpoint holds of it, by name."""
        return {"advantage": self}

    def state_dict(self) -> dict[str, Any]:
        """The running baselines."""
        return self.estimator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.estimator.load_state_dict(state)


class CriticCredit(BaselineCredit):
    """One advantage per token, by skip-observation GAE over the critic's values; trains the critic on each batch."""

    def __init__(self, config: RunConfig, critic: ValueModel, stage: Stage) -> None:
        self._config = config
        self._stage = stage
        self.critic = critic
        self._learning: list[Sequence] = []
        self._step = 0
        self._metrics: dict[str, Any] = {}

    def scalars(self, trajectories: SequenceOf[Trajectory]) -> tuple[list[float], list[int]]:
        """Placeholders: `assign` gives the advantages. Every trajectory is trained on."""
        return [0.0] * len(trajectories), list(range(len(trajectories)))

    def holds_policy(self, step: int) -> bool:
        return step < self._config.critic.warmup_steps

    def assign(self, step: int, trajectories: list[Trajectory], sequences: list[Sequence]) -> list[Sequence]:
        """Values, then advantages and targets; the value updates begin, and with `critic_first` are waited for."""
        with self._stage("critic", step):
            self._collect()
            targets = self._estimate(trajectories, sequences)
            self._step, self._learning = step, learning_sequences(sequences, targets)
            self.critic.begin_updates(self._learning, self._config.critic.updates)
            if self._config.critic.order == "critic_first" and not self.holds_policy(step):
                self._collect()
                targets = self._estimate(trajectories, sequences, report=False)
        lengths = [len(sequence) for sequence in sequences]
        return with_array(sequences, "advantages", _split(targets.advantages, lengths))

    def learn(self, step: int) -> None:
        if self._learning:
            with self._stage("critic", step):
                if self.critic.work():
                    self._collect()
        if self.holds_policy(step):
            self._metrics["skipped"] = (
                f"critic warm-up: step {step + 1} of {self._config.critic.warmup_steps} trains the critic alone"
            )

    def take_metrics(self) -> dict[str, Any]:
        if self._learning:
            with self._stage("critic", self._step):
                self._collect()
        metrics, self._metrics = self._metrics, {}
        return metrics

    def save(self, path: Path) -> None:
        self.critic.save_hf(path)

    @property
    def parts(self) -> dict[str, BaselineCredit]:
        return {"critic": self}

    @property
    def files(self) -> ModelFiles:
        """The critic's: a checkpoint holds its weights and optimiser like the policy's."""
        return self.critic.files

    def state_dict(self) -> dict[str, Any]:
        """What the weights do not say: value updates made."""
        return self.critic.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The weights were loaded with their schedule."""

    def close(self) -> None:
        self.critic.close()

    def _estimate(
        self, trajectories: list[Trajectory], sequences: list[Sequence], *, report: bool = True
    ) -> Targets:
        episodes = to_episodes(trajectories, self.critic.values(sequences))
        targets = gae_targets(self._config.advantage, episodes)
        if report:
            self._metrics |= estimate_metrics(episodes, targets)
        return targets

    def _collect(self) -> None:
        """Wait for the value updates that have begun, if any."""
        if self._learning:
            learned, self._learning = self._learning, []
            self._metrics |= critic_metrics(self.critic.finish_updates(), learned)


def build_credit(config: RunConfig, stage: Stage, control: Control | None = None) -> BaselineCredit:
    """What `advantage.name` asks for; builds the critic, or meets the one on ranks of its own (collective).

    control: of the trainer's ranks; needed with `critic.ranks: own`.
    """
    if not ADVANTAGES[config.advantage.name].needs_critic:
        return BaselineCredit(config)
    if config.critic.ranks == "own":
        assert control is not None, "only rank 0 speaks with a critic on ranks of its own"
        return CriticCredit(config, RemoteCritic.connect(config, control), stage)
    critic = SharedCritic(build_critic(config), asynchronous=config.checkpoint.asynchronous)
    return CriticCredit(config, critic, stage)


def to_episodes(trajectories: SequenceOf[Trajectory], values: Values) -> Episodes:
    """The batch end to end, with each reward on its trajectory's last token."""
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]

    def tokens(per_trajectory: Any) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(per_trajectory), lengths))

    rewards = torch.zeros(sum(lengths))
    ends = np.cumsum(lengths) - 1
    earned = [t.required_reward() if t.loss_mask.any() else 0.0 for t in trajectories]
    rewards[torch.from_numpy(ends)] = torch.tensor(earned, dtype=torch.float32)
    return Episodes(
        rewards=rewards,
        values=torch.from_numpy(np.concatenate(values.before)),
        after=tokens(values.after),
        action_mask=torch.from_numpy(np.concatenate([t.loss_mask for t in trajectories])),
        sequence_ids=tokens(range(len(trajectories))),
        truncated=tokens([t.status == Status.TRUNCATED for t in trajectories]),
        turn_ids=torch.from_numpy(np.concatenate([_turn_ids(t) for t in trajectories])),
    )


def _turn_ids(trajectory: Trajectory) -> np.ndarray:
    """int64 [L]: number of the turn each action token belongs to, -1 off them."""
    ids = np.full(len(trajectory.token_ids), -1, np.int64)
    for number, turn in enumerate(trajectory.turns):
        ids[turn.start : turn.end] = number
    return ids


def learning_sequences(sequences: SequenceOf[Sequence], targets: Targets) -> list[Sequence]:
    """What a value update needs: tokens, action mask, returns and the values before the batch's updates."""
    lengths = [len(sequence) for sequence in sequences]
    returns, old_values = _split(targets.returns, lengths), _split(targets.values, lengths)
    return [
        Sequence(
            sequence.token_ids,
            1.0,
            {
                "action_mask": sequence.arrays["action_mask"],
                "returns": returns[i],
                "old_values": old_values[i],
            },
        )
        for i, sequence in enumerate(sequences)
    ]


def _split(flat: Tensor, lengths: SequenceOf[int]) -> list[np.ndarray]:
    return np.split(flat.float().numpy(), np.cumsum(lengths)[:-1])


def estimate_metrics(episodes: Episodes, targets: Targets) -> dict[str, float]:
    """How good the values were before the batch's updates, and how large the advantages are."""
    mask = episodes.action_mask
    if not bool(mask.any()):
        return {}
    advantages = targets.advantages[mask].double()
    explained = explained_variance(targets.values, targets.returns, mask)
    return {
        **({} if math.isnan(explained) else {"critic/explained_variance": explained}),
        "critic/value_mean": float(targets.values[mask].double().mean()),
        "critic/return_mean": float(targets.returns[mask].double().mean()),
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std(correction=0)),
    }


def critic_metrics(updates: SequenceOf[ValueUpdate], sequences: SequenceOf[Sequence]) -> dict[str, Any]:
    """Of the K updates on one batch."""
    tokens = max(count_actions(sequences), 1)
    return {
        "critic/loss": float(np.mean([update.loss for update in updates])),
        "critic/squared_error_first": updates[0].squared_error / tokens,
        "critic/squared_error_last": updates[-1].squared_error / tokens,
        "critic/grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "critic/lr": updates[-1].lr,
        "critic/clipped": float(np.mean([update.clipped / tokens for update in updates])),
        "critic/skipped_updates": sum(update.skipped is not None for update in updates),
    }
