"""The dedicated old-logit model: ranks of its own that follow the actor's versions and score what waits to be trained.

Runs under torchrun with the trainer's layout; its rank r holds the same part of the model as the trainer's rank r, and
receives that part's differences from it. Rank 0 decides what all do next: take a version, score trajectories, or end.

Invariants: every rank takes the same versions in the same order; a trajectory is scored only when all its versions are
here; a score is in the bank before the next is begun.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from megatron_async.bank import Bank
from megatron_async.config.schema import RunConfig
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles, StatusWriter, Timeline
from megatron_async.old_logits.builders import open_history, peer_file
from megatron_async.old_logits.dedicated import END
from megatron_async.old_logits.peers import PeerLink
from megatron_async.old_logits.snapshot import SnapshotSource
from megatron_async.snapshots.transfer import Follower, VersionStep
from megatron_async.training.batch import join_messages, split_messages
from megatron_async.training.control import Control
from megatron_async.trajectory import Trajectory

T = TypeVar("T")

_END, _TAKE, _SCORE, _NOTHING = b"E", b"V", b"S", b"N"
_CONTROL_MARGIN_S = 120.0
_SILENCE_S = 10.0
"""Rank 0 speaks at least this often, so that the other ranks see that it lives."""


def scoring_sequences(trajectories: list[Trajectory], version: int) -> list[Sequence]:
    """Engine sequences with what scoring needs, seen from `version`: action_mask, version_gap, kv_mismatch."""
    return [
        Sequence(
            trajectory.token_ids,
            trajectory.sampling.temperature,
            {
                "action_mask": trajectory.loss_mask,
                "version_gap": np.where(trajectory.loss_mask, version - trajectory.versions, 0),
                "kv_mismatch": trajectory.kv_mismatch,
            },
            routed_experts=trajectory.routed_experts,
        )
        for trajectory in trajectories
    ]


class ActorGone(UserError):
    """The trainer's rank stopped sending before the run was over."""


def main(config: RunConfig) -> int:
    """Score until the run is finished; returns the exit code."""
    policy = Policy.build(config.model, config.layout, config.trainer, None, config.seed)
    scorer = Scorer(config, policy)
    try:
        while scorer.step():
            continue
    finally:
        scorer.close()
        platform.shutdown()
    return 0


class Scorer:
    """One rank of the dedicated model."""

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        self.config = config
        rank, files = dist.get_rank(), RunFiles(config.run_path)
        leads = rank == 0
        folder = files.root / "scorer" / f"rank_{rank:04d}"
        self._control = Control(config.trainer.deadline_s + _CONTROL_MARGIN_S)
        self._bank = Bank.open(config.bank_url) if leads else None
        self._status = StatusWriter(config.run_path, "scorer") if leads else None
        self._timeline = Timeline(config.run_path if leads else None, "scorer")
        tensors = dict(policy.named_parameters())
        self._link = PeerLink.call(peer_file(config, rank), config.trainer.deadline_s)
        version = self._link.receive_weights(tensors.values())  # a resumed actor goes on from a later one
        self._store = open_history(config, policy, version, folder / "history")
        self._source = SnapshotSource(
            policy, self._store, with_start=False, reuse_training_forward=False, background=False, eager=True
        )
        self._follower = Follower(self._store, tensors, folder / "scratch")
        self._steps: queue.Queue[VersionStep | Exception] = queue.Queue()
        self._receiver = threading.Thread(target=self._receive, name="actor-link", daemon=True)
        self._receiver.start()
        self._ended_at: float | None = None
        self._offered: set[str] = set()

    def _receive(self) -> None:
        """Takes in what the actor sends, while this rank computes."""
        while True:
            try:
                message = self._link.receive()
                if message == END:
                    self._ended_at = time.monotonic()
                    return
                self._steps.put(VersionStep.from_bytes(message))
            except Exception as error:  # noqa: BLE001 - handed to the thread that works, which raises it
                self._steps.put(error)
                return

    def step(self) -> bool:
        """Do what rank 0 says; False when the run is over. Collective."""
        message = self._control.from_rank_zero(self._next)
        kind, body = message[:1], message[1:]
        if kind == _TAKE:
            self._take()
        elif kind == _SCORE:
            self._score([Trajectory.from_bytes(part) for part in split_messages(body)])
        return kind != _END

    def _next(self) -> bytes:
        """What to do now: versions first, since trajectories wait for them."""
        assert self._bank is not None, "rank 0 owns the bank"
        started = time.monotonic()
        while time.monotonic() - started < _SILENCE_S:
            if not self._steps.empty():
                return _TAKE
            if self._bank.get_state("phase") == "finished":
                return _END
            self._raise_if_ended()
            if offered := self._offer(self._bank):
                return _SCORE + join_messages([trajectory.to_bytes() for trajectory in offered])
            self._show("waiting", f"trajectories of versions up to {self._store.live_version}")
            time.sleep(self.config.rollout.poll_s / 2)
        return _NOTHING

    def _raise_if_ended(self) -> None:
        deadline_s = self.config.trainer.deadline_s
        if self._ended_at is not None and time.monotonic() - self._ended_at > deadline_s:
            raise ActorGone(f"the trainer stopped {deadline_s:g} s ago without having finished the run")

    def _offer(self, bank: Bank) -> list[Trajectory]:
        layout, live = self.config.layout, self._store.live_version
        room = (
            self.config.trainer.micro_batch_tokens * layout.data_parallel_size * layout.context_parallel_size
        )
        oldest = live - self.config.rollout.max_staleness
        offered = bank.list_unscored(self._offered, oldest, live, room)
        self._offered |= {trajectory.trajectory_id for trajectory in offered}
        return offered

    def _take(self) -> None:
        step = self._timed("follow", lambda: self._steps.get(timeout=self.config.trainer.deadline_s))
        if isinstance(step, Exception):
            raise ActorGone(f"the trainer's rank {dist.get_rank()} stopped sending: {step}") from step
        # The batch in hand was taken under the version before, so it may be older by one.
        oldest = step.version - 1 - self.config.rollout.max_staleness
        self._store.set_needed([known for known in self._store.versions() if known >= oldest])
        self._timed("follow", lambda: self._follower.take(step))

    def _score(self, trajectories: list[Trajectory]) -> None:
        ids = [trajectory.trajectory_id for trajectory in trajectories]
        live = self._store.live_version
        sequences = scoring_sequences(trajectories, live)
        self._timed("score", lambda: self._source.score_ahead(sequences, ids))
        scores = self._source.hand_over(ids)
        if self._bank is not None:
            self._bank.save_scores(scores, live - 1 - self.config.rollout.max_staleness)

    def _timed(self, stage: str, work: Callable[[], T]) -> T:
        self._show(stage, "")
        with self._timeline.stage(stage, self._store.live_version):
            return work()

    def _show(self, phase: str, what: str) -> None:
        if self._status is not None:
            self._status.set(phase, what, {"version": self._store.live_version, "scored": len(self._offered)})

    def close(self) -> None:
        for part in (self._source, self._bank, self._status, self._timeline):
            if part is not None:
                part.close()
        self._receiver.join(_SILENCE_S)
