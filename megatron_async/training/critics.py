"""The critic behind one interface, whichever ranks it lives on.

Invariants: every method is collective over the trainer's ranks and gives every rank the same; updates that have begun
are finished before values are asked for or anything is saved. `SharedCritic` is the critic on the caller's own ranks,
`RemoteCritic` (training/remote_critic.py) the one on ranks of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_async.config.schema import OptimizerConfig, RunConfig
from megatron_async.engine.critic import Critic, Values
from megatron_async.engine.sequences import Packed, Sequence
from megatron_async.objectives.value import value_loss
from megatron_async.training.checkpointing import LocalFiles, ModelFiles


@dataclass(frozen=True, slots=True)
class ValueUpdate:
    """What one value update did.

    Attributes:
        loss: mean over the batch's action tokens.
        squared_error, clipped: summed over them.
        grad_norm: before clipping.
        lr: learning rate used.
        skipped: why no step was made, or None.
    """

    loss: float
    squared_error: float
    clipped: float
    grad_norm: float
    lr: float
    skipped: str | None


class ValueModel(ABC):
    """A critic that judges and learns."""

    @abstractmethod
    def values(self, sequences: list[Sequence]) -> Values:
        """See `Critic.values`."""

    @abstractmethod
    def begin_updates(self, sequences: list[Sequence], count: int) -> None:
        """Ask for `count` value updates on the whole batch (`learning_sequences`).

        They may run while the caller goes on.
        """

    @abstractmethod
    def work(self) -> bool:
        """Make the updates that have begun and run nowhere else. Returns whether `finish_updates` would not wait."""

    @abstractmethod
    def finish_updates(self) -> list[ValueUpdate]:
        """Wait for the updates that have begun."""

    @abstractmethod
    def save_hf(self, path: Path) -> None:
        """See `Critic.save_hf`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of it (JSON): optimizer_steps, the value updates made."""

    @property
    @abstractmethod
    def files(self) -> ModelFiles:
        """Its part of a checkpoint."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more is asked."""


class SharedCritic(ValueModel):
    """On the caller's ranks, which work on it in turn. random_states: as for `LocalFiles`."""

    def __init__(self, critic: Critic, *, asynchronous: bool, random_states: bool = False) -> None:
        self.critic = critic
        self._files = LocalFiles(critic, asynchronous=asynchronous, random_states=random_states)
        self._begun: tuple[list[Sequence], int] = ([], 0)
        self._made: list[ValueUpdate] = []

    def values(self, sequences: list[Sequence]) -> Values:
        return self.critic.values(sequences)

    def begin_updates(self, sequences: list[Sequence], count: int) -> None:
        self._begun = (sequences, count)

    def work(self) -> bool:
        (sequences, count), self._begun = self._begun, ([], 0)
        self._made += [update_critic(self.critic, sequences) for _ in range(count)]
        return True

    def finish_updates(self) -> list[ValueUpdate]:
        self.work()
        made, self._made = self._made, []
        return made

    def save_hf(self, path: Path) -> None:
        self.critic.save_hf(path)

    @property
    def num_updates(self) -> int:
        """Value updates made so far."""
        assert self.critic.optimizer is not None, "a critic that judges also learns"
        return self.critic.optimizer.num_steps

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer_steps": self.num_updates}

    @property
    def files(self) -> ModelFiles:
        return self._files

    def close(self) -> None:
        """It ends with its ranks."""


def build_critic(config: RunConfig) -> Critic:
    """The critic of a run, on this process's ranks."""
    model = replace(config.model, path=config.critic.path or config.model.path)
    optimizer = critic_optimizer(config)
    return Critic.build(
        model, config.critic_layout, config.trainer, optimizer, config.seed, critic=config.critic
    )


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


def update_critic(critic: Critic, sequences: list[Sequence]) -> ValueUpdate:
    """One value update on the whole batch."""
    tokens = count_actions(sequences)

    def loss(packed: Packed, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        arrays, mask = packed.arrays, packed.arrays["action_mask"].bool() & (packed.positions > 0)
        config = critic.critic_config
        result = value_loss(config, values, arrays["returns"], arrays["old_values"], mask, tokens)
        return result.loss, result.stats

    made = critic.train_step(sequences, loss)
    return ValueUpdate(
        loss=made.loss,
        squared_error=float(made.stats.get("squared_error", 0.0)),
        clipped=float(made.stats.get("clipped", 0.0)),
        grad_norm=made.grad_norm,
        lr=made.lr,
        skipped=made.skipped,
    )


def count_actions(sequences: SequenceOf[Sequence]) -> int:
    """Action tokens of a batch."""
    return int(sum(sequence.arrays["action_mask"].sum() for sequence in sequences))
