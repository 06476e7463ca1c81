"""Who gets the credit: from a batch's rewards to the advantage of every token, by a baseline or by a critic.

Invariants: every rank computes the same advantages (it holds the whole batch); what a step learns besides the policy
is learned here, once per batch; a trajectory's reward is given out once, to its last action token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async.advantages import AdvantageEstimator, build_advantage, explained_variance
from megatron_async.advantages.targets import Episodes, Targets, gae_targets
from megatron_async.config.methods import ADVANTAGES
from megatron_async.config.schema import OptimizerConfig, RunConfig
from megatron_async.engine.critic import Critic, Values
from megatron_async.engine.sequences import Packed, Sequence
from megatron_async.engine.token_model import TrainStepResult
from megatron_async.objectives.value import value_loss
from megatron_async.training.batch import with_array
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

    def __init__(self, config: RunConfig, critic: Critic, stage: Stage) -> None:
        self._config = config
        self._stage = stage
        self.critic = critic
        self._pending: list[Sequence] = []
        self._metrics: dict[str, Any] = {}

    def scalars(self, trajectories: SequenceOf[Trajectory]) -> tuple[list[float], list[int]]:
        """Placeholders: `assign` gives the advantages. Every trajectory is trained on."""
        return [0.0] * len(trajectories), list(range(len(trajectories)))

    def holds_policy(self, step: int) -> bool:
        return step < self._config.critic.warmup_steps

    def assign(self, step: int, trajectories: list[Trajectory], sequences: list[Sequence]) -> list[Sequence]:
        """Values, then advantages and targets; with `critic_first` the critic learns in between."""
        with self._stage("critic", step):
            targets = self._estimate(trajectories, sequences)
            self._pending = learning_sequences(sequences, targets)
            if self._config.critic.order == "critic_first" and not self.holds_policy(step):
                self._update()
                targets = self._estimate(trajectories, sequences, report=False)
        lengths = [len(sequence) for sequence in sequences]
        return with_array(sequences, "advantages", _split(targets.advantages, lengths))

    def learn(self, step: int) -> None:
        if self._pending:
            with self._stage("critic", step):
                self._update()
        if self.holds_policy(step):
            self._metrics["skipped"] = (
                f"critic warm-up: step {step + 1} of {self._config.critic.warmup_steps} trains the critic alone"
            )

    def take_metrics(self) -> dict[str, Any]:
        metrics, self._metrics = self._metrics, {}
        return metrics

    def save(self, path: Path) -> None:
        self.critic.save_hf(path)

    @property
    def parts(self) -> dict[str, BaselineCredit]:
        return {"critic": self}

    @property
    def model(self) -> Critic:
        """The critic: a checkpoint holds its weights and optimiser like the policy's."""
        return self.critic

    def state_dict(self) -> dict[str, Any]:
        """What the weights do not say: value updates made."""
        assert self.critic.optimizer is not None, "a critic that judges also learns"
        return {"optimizer_steps": self.critic.optimizer.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The weights were loaded with their schedule."""

    def _estimate(
        self, trajectories: list[Trajectory], sequences: list[Sequence], *, report: bool = True
    ) -> Targets:
        episodes = to_episodes(trajectories, self.critic.values(sequences))
        targets = gae_targets(self._config.advantage, episodes)
        if report:
            self._metrics |= estimate_metrics(episodes, targets)
        return targets

    def _update(self) -> None:
        """K value updates on the batch in hand."""
        pending, self._pending = self._pending, []
        results = [update_critic(self.critic, pending) for _ in range(self._config.critic.updates)]
        self._metrics |= critic_metrics(results, pending)


def build_credit(config: RunConfig, stage: Stage) -> BaselineCredit:
    """What `advantage.name` asks for; builds the critic where it needs one (collective)."""
    if not ADVANTAGES[config.advantage.name].needs_critic:
        return BaselineCredit(config)
    return CriticCredit(config, build_critic(config), stage)


def build_critic(config: RunConfig) -> Critic:
    """The critic of a run, on the actor's ranks and in its layout."""
    model = replace(config.model, path=config.critic.path or config.model.path)
    optimizer = critic_optimizer(config)
    return Critic.build(model, config.layout, config.trainer, optimizer, config.seed, critic=config.critic)


def critic_optimizer(config: RunConfig) -> OptimizerConfig:
    """The run's Adam with the critic's rate, clipping and warm-up; its rate does not decay."""
    critic = config.critic
    return replace(
        config.optimizer,
        lr=critic.lr,
        min_lr=0.0,
        clip_grad=critic.clip_grad,
        lr_warmup_steps=critic.lr_warmup_steps,
        lr_decay="constant",
    )


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


def update_critic(critic: Critic, sequences: list[Sequence]) -> TrainStepResult:
    """One value update on the whole batch."""
    tokens = _actions(sequences)

    def loss(packed: Packed, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        arrays, mask = packed.arrays, packed.arrays["action_mask"].bool() & (packed.positions > 0)
        config = critic.critic_config
        result = value_loss(config, values, arrays["returns"], arrays["old_values"], mask, tokens)
        return result.loss, result.stats

    return critic.train_step(sequences, loss)


def _actions(sequences: SequenceOf[Sequence]) -> int:
    return int(sum(sequence.arrays["action_mask"].sum() for sequence in sequences))


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


def critic_metrics(results: SequenceOf[TrainStepResult], sequences: SequenceOf[Sequence]) -> dict[str, Any]:
    """Of the K updates on one batch."""
    tokens = max(_actions(sequences), 1)
    errors = [float(result.stats.get("squared_error", 0.0)) / tokens for result in results]
    return {
        "critic/loss": float(np.mean([result.loss for result in results])),
        "critic/squared_error_first": errors[0],
        "critic/squared_error_last": errors[-1],
        "critic/grad_norm": float(np.mean([result.grad_norm for result in results])),
        "critic/lr": results[-1].lr,
        "critic/clipped": float(np.mean([float(r.stats.get("clipped", 0.0)) / tokens for r in results])),
        "critic/skipped_updates": sum(result.skipped is not None for result in results),
    }
