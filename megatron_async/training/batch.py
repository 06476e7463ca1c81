"""From finished trajectories to the sequences that the engine trains on.

Invariants: every rank holds the same batch in the same order; a trajectory enters a step at most once (the bank
reserves it in a transaction); per-token arrays stay aligned to the token they speak of.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from megatron_async.bank import Bank
from megatron_async.bank.lineage import Lineage
from megatron_async.config.schema import RunConfig
from megatron_async.engine.sequences import Sequence
from megatron_async.errors import UserError
from megatron_async.old_logits import AnchorLogprobs
from megatron_async.training.batch_wait import BatchWait
from megatron_async.training.control import Control
from megatron_async.training.stopping import StopAsked
from megatron_async.trajectory import Trajectory

IdleWork = Callable[[list[Trajectory]], None]

_BATCH, _MEANWHILE, _LATE, _STOP, _STILL = b"B", b"M", b"L", b"S", b"W"
_SPEAK_S = 30.0
"""Rank 0 speaks at least this often while it waits: the others wait for it no longer than `Control` says."""


class BatchDeadline(UserError):
    """No batch became ready in time."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on.

    trajectories: all that were taken. advantages: one scalar each. trained: indices of those that enter the loss
    (a group whose members all have the same reward carries no gradient and may be left out). lineage: of the versions.
    """

    trajectories: list[Trajectory]
    advantages: list[float]
    trained: list[int]
    version: int
    lineage: Lineage

    @property
    def trained_ids(self) -> list[str]:
        return [self.trajectories[i].trajectory_id for i in self.trained]

    @property
    def trained_trajectories(self) -> list[Trajectory]:
        return [self.trajectories[i] for i in self.trained]

    @property
    def rewards(self) -> list[float]:
        return [trajectory.required_reward() for trajectory in self.trajectories]

    @property
    def version_gaps(self) -> np.ndarray:
        """int [A]: version gap n of every action token of the trained trajectories, in updates."""
        trained = [self.trajectories[i] for i in self.trained]
        gaps = [self.lineage.gaps(self.version, t.versions[t.loss_mask]) for t in trained]
        return np.concatenate(gaps) if gaps else np.zeros(0, np.int64)


class BatchFeed:
    """Takes batches from the bank on rank 0 and hands the same trajectories to every rank.

    bank: on rank 0 only. on_wait: called while waiting with what is waited for (status display). anyone_late: on rank
    0, asked while waiting whether an engine needs weights; catch_up: then called on every rank. stop: on rank 0, asked
    who wants the training to end here, if anybody does. keep_claim: on rank 0, called before a batch is taken; raises
    where another trainer may take it.
    """

    def __init__(
        self,
        config: RunConfig,
        control: Control,
        bank: Bank | None,
        on_wait: Callable[[str], None],
        anyone_late: Callable[[], bool] | None = None,
        catch_up: Callable[[], None] = lambda: None,
        stop: Callable[[], str] = lambda: "",
        keep_claim: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._control = control
        self._bank = bank
        self._on_wait = on_wait
        self._anyone_late = anyone_late
        self._catch_up = catch_up
        self._stop = stop
        self._keep_claim = keep_claim
        self._offered: set[str] = set()

    def take(self, step: int, least_updates: int, idle: IdleWork | None = None) -> list[Trajectory]:
        """The batch of `step`, no token of it of a version with fewer than `least_updates` behind it; after a resume,
        the one on record.

        idle: called on every rank while the batch is incomplete, with finished trajectories that it was not called
        with before, about one micro-batch of them per rank.
        Raises BatchDeadline once `BatchWait` is over, naming what was there and what was missing, and StopAsked, with
        nothing taken, once a stop is asked for.
        """
        waited = BatchWait(self._config, self._bank.signs_of_life) if self._bank is not None else None
        while True:
            message = self._control.from_rank_zero(
                lambda: self._next(step, least_updates, waited, idle is not None)
            )
            if message == _STILL:
                continue
            if message == _LATE:
                self._catch_up()
                continue
            if message[:1] == _STOP:
                raise StopAsked(step, message[1:].decode())
            trajectories = [Trajectory.from_bytes(part) for part in split_messages(message[1:])]
            if message[:1] == _BATCH or idle is None:
                return trajectories
            idle(trajectories)

    def _next(self, step: int, least_updates: int, waited: BatchWait | None, has_idle_work: bool) -> bytes:
        """The batch, or what can be worked on meanwhile."""
        assert self._bank is not None and waited is not None, "rank 0 owns the bank"
        config, started = self._config, time.monotonic()
        overtaking = config.rollout.window if config.rollout.admission == "window" else None
        while True:
            if by := self._stop():
                return _STOP + by.encode()
            self._keep_claim()
            cut = config.batch
            batch = self._bank.take_batch(
                step, cut.groups, cut.group_size, least_updates, cut.max_filtered_groups, overtaking
            )
            if batch:
                if self._offered:  # what was taken, or went stale, or was filtered, need not be remembered
                    self._offered &= self._bank.waiting_ids()
                return _BATCH + join_messages([trajectory.to_bytes() for trajectory in batch])
            if why := waited.over():
                raise BatchDeadline(self._deadline_message(step, why))
            self._on_wait(self._progress(step))
            if self._anyone_late is not None and self._anyone_late():
                return _LATE
            if has_idle_work and (offered := self._offer(least_updates)):
                return _MEANWHILE + join_messages([trajectory.to_bytes() for trajectory in offered])
            if time.monotonic() - started > _SPEAK_S:
                return _STILL
            time.sleep(config.rollout.poll_s / 2)

    def _progress(self, step: int) -> str:
        """How much of the batch there is."""
        assert self._bank is not None
        cut = self._config.batch
        text = f"batch: {self._bank.peek_ready(cut.group_size)} of {cut.groups} groups"
        if cut.max_filtered_groups == 0:
            return text
        filtered = self._bank.filtered(step).groups
        return f"{text}, {filtered} of at most {cut.max_filtered_groups} without variance filtered"

    def _offer(self, least_updates: int) -> list[Trajectory]:
        assert self._bank is not None
        layout = self._config.layout
        ranks = layout.data_parallel_size * layout.context_parallel_size
        room = self._config.trainer.micro_batch_tokens * ranks
        offered = self._bank.list_waiting(self._offered, least_updates, room)
        self._offered |= {trajectory.trajectory_id for trajectory in offered}
        return offered

    def _deadline_message(self, step: int, why: str) -> str:
        assert self._bank is not None
        return (
            f"step {step}: no batch: {why}. {self._progress(step)} of {self._config.batch.group_size} are complete; "
            f"trajectories by state: {self._bank.counts()}. Look at what the rollout waits for (status/rollout.json, "
            "logs/rollout.log), or raise that deadline."
        )


def unrewarded_sequences(
    trajectories: SequenceOf[Trajectory], version: int, lineage: Lineage
) -> list[Sequence]:
    """Engine sequences of trajectories that are only scored; arrays as in `to_sequences`, advantages 0."""
    return [_to_sequence(trajectory, 0.0, version, 0.0, lineage) for trajectory in trajectories]


def to_sequences(batch: Batch) -> list[Sequence]:
    """Engine sequences of the trajectories that are trained, with every per-token array of the loss but the anchor.

    Arrays, all [L] and token-aligned: rollout_logprobs (0 off the action tokens), action_mask, advantages,
    version_gap (difference of the ids, by which sources find the version), update_gap (what the loss reads: updates in
    between), kv_mismatch, rewards, and age_seconds (of the token's version) where the lineage knows it.
    """
    return [
        _to_sequence(
            trajectory, batch.advantages[i], batch.version, trajectory.required_reward(), batch.lineage
        )
        for i, trajectory in ((i, batch.trajectories[i]) for i in batch.trained)
    ]


def _to_sequence(
    trajectory: Trajectory, advantage: float, version: int, reward: float, lineage: Lineage
) -> Sequence:
    mask = trajectory.loss_mask
    length = len(trajectory.token_ids)
    age = lineage.seconds(time.time(), trajectory.versions)
    timed = {} if age is None else {"age_seconds": np.where(mask, age, 0.0).astype(np.float32)}
    return Sequence(
        token_ids=trajectory.token_ids,
        temperature=trajectory.sampling.temperature,
        arrays={
            "rollout_logprobs": np.where(mask, trajectory.rollout_logprobs, 0.0).astype(np.float32),
            "action_mask": mask,
            "advantages": np.full(length, advantage, np.float32),
            "version_gap": np.where(mask, version - trajectory.versions, 0).astype(np.int64),
            "update_gap": np.where(mask, lineage.gaps(version, trajectory.versions), 0),
            "kv_mismatch": trajectory.kv_mismatch,
            "rewards": np.full(length, reward, np.float32),
            **timed,
        },
        routed_experts=trajectory.routed_experts,
    )


def with_array(sequences: SequenceOf[Sequence], name: str, values: SequenceOf[np.ndarray]) -> list[Sequence]:
    """The same sequences with one array added or replaced. values: [L] per sequence."""
    pairs = zip(sequences, values, strict=True)
    return [replace(s, arrays={**s.arrays, name: value}) for s, value in pairs]


def with_arrays(sequences: SequenceOf[Sequence], anchors: AnchorLogprobs) -> list[Sequence]:
    """The same sequences with the scored log-probs among their arrays."""
    scored: dict[str, SequenceOf[np.ndarray] | None] = {
        "anchor_logprobs": anchors.values,
        "anchor_is_current": anchors.is_current,
        "anchor_exact": anchors.exact,
        "reference_logprobs": anchors.reference,
    }
    present = {name: values for name, values in scored.items() if values is not None}
    return [
        replace(s, arrays={**s.arrays, **{name: values[i] for name, values in present.items()}})
        for i, s in enumerate(sequences)
    ]


def join_messages(parts: SequenceOf[bytes]) -> bytes:
    """Many byte strings as one; `split_messages` takes them apart."""
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def split_messages(data: bytes) -> list[bytes]:
    """Undo `join_messages`."""
    parts, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        parts.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return parts
