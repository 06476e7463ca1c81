"""The dedicated old-logit model: ranks of its own that follow the actor's versions and score what waits to be trained.

Runs under torchrun with the trainer's layout; its rank r holds the same part of the model as the trainer's rank r, and
receives that part's differences from it. Rank 0 decides what all do next: take a version, score trajectories, or end.

Invariants: every rank takes the same versions in the same order; a trajectory is scored only when all its versions are
here; a score is in the bank before the next is begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from megatron_async.bank import Bank
from megatron_async.bank.lineage import Lineage
from megatron_async.bank.requests import FINISHED, PHASE
from megatron_async.beside import LAST, NOTHING, SILENCE_S, PartBeside
from megatron_async.config.schema import RunConfig
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.errors import PartnerGone
from megatron_async.observe import RunFiles
from megatron_async.old_logits.builders import open_history, peer_file
from megatron_async.old_logits.snapshot import SnapshotSource
from megatron_async.peers import Inbox, PeerGone, PeerLink
from megatron_async.snapshots.transfer import Follower, VersionStep
from megatron_async.training.batch import join_messages, split_messages
from megatron_async.trajectory import Trajectory

T = TypeVar("T")

_TAKE, _SCORE = b"V", b"S"


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


class ActorGone(PartnerGone):
    """The trainer's rank stopped sending before the run was over."""


def main(config: RunConfig) -> int:
    """Score until the run is finished; returns the exit code."""
    policy = Policy.build(config.model, config.layout, config.trainer, None, config.seed)
    return Scorer(config, policy).run()


class Scorer(PartBeside):
    """One rank of the dedicated model."""

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        super().__init__(config, "scorer")
        rank = dist.get_rank()
        folder = RunFiles(config.run_path).root / "scorer" / f"rank_{rank:04d}"
        self._bank = Bank.open(config.bank_url) if self.leads else None
        tensors = dict(policy.named_parameters())
        link = PeerLink.call(peer_file(config, rank), config.trainer.deadline_s)
        version = link.receive_weights(tensors.values())  # a resumed actor goes on from a later one
        self._store = open_history(config, policy, version, folder / "history")
        self._source = SnapshotSource(
            policy, self._store, with_start=False, reuse_training_forward=False, background=False, eager=True
        )
        self._follower = Follower(self._store, tensors, folder / "scratch")
        self._steps = Inbox(link, VersionStep.from_bytes)
        self._offered: set[str] = set()
        self._lineage = Lineage()

    def _next(self) -> bytes:
        """What to do now: versions first, since trajectories wait for them."""
        assert self._bank is not None, "rank 0 owns the bank"
        started = time.monotonic()
        while time.monotonic() - started < SILENCE_S:
            if not self._steps.empty:
                # The batch in hand was taken under the version before the one that comes, which is the live one.
                return _TAKE + str(self._oldest(self._bank, 0)).encode()
            if self._bank.get_state(PHASE) == FINISHED:
                return LAST
            self._raise_if_ended()
            if offered := self._offer(self._bank):
                return _SCORE + join_messages([trajectory.to_bytes() for trajectory in offered])
            what = f"trajectories of versions up to {self._store.live_version}"
            self._show("waiting", what, self._counters)
            time.sleep(self.config.rollout.poll_s / 2)
        return NOTHING

    def _do(self, kind: bytes, body: bytes) -> None:
        if kind == _TAKE:
            self._take(int(body))
        else:
            self._score([Trajectory.from_bytes(part) for part in split_messages(body)])

    def _raise_if_ended(self) -> None:
        deadline_s, ended_at = self.config.trainer.deadline_s, self._steps.ended_at
        if ended_at is not None and time.monotonic() - ended_at > deadline_s:
            raise ActorGone(f"the trainer stopped {deadline_s:g} s ago without having finished the run")

    def _offer(self, bank: Bank) -> list[Trajectory]:
        layout, live = self.config.layout, self._store.live_version
        room = (
            self.config.trainer.micro_batch_tokens * layout.data_parallel_size * layout.context_parallel_size
        )
        offered = bank.list_unscored(self._offered, self._oldest(bank, 0), live, room)
        self._offered |= {trajectory.trajectory_id for trajectory in offered}
        return offered

    def _oldest(self, bank: Bank, more: int) -> int:
        """The oldest version that a token may be of which is trained now, or was `more` updates ago."""
        live = self._store.live_version
        if live > self._lineage.newest:
            for made in bank.versions(above=self._lineage.newest):
                if made.parent is not None:
                    self._lineage.add(made.version, made.parent)
        known = min(live, self._lineage.newest)  # the trainer writes a version down before it sends it
        return self._lineage.oldest_within(known, self.config.rollout.max_staleness + more)

    def _take(self, oldest: int) -> None:
        step = self._work("follow", self._receive)
        self._store.set_needed([known for known in self._store.versions() if known >= oldest])
        self._work("follow", lambda: self._follower.take(step))

    def _receive(self) -> VersionStep:
        deadline_s = self.config.trainer.deadline_s
        try:
            step = self._steps.take(deadline_s)
        except PeerGone as error:
            raise ActorGone(f"the trainer's rank {dist.get_rank()} stopped sending: {error}") from error
        if step is None:
            raise ActorGone(f"the trainer's rank {dist.get_rank()} sent no version within {deadline_s:g} s")
        return step

    def _score(self, trajectories: list[Trajectory]) -> None:
        ids = [trajectory.trajectory_id for trajectory in trajectories]
        live = self._store.live_version
        sequences = scoring_sequences(trajectories, live)
        self._work("score", lambda: self._source.score_ahead(sequences, ids))
        scores = self._source.hand_over(ids)
        if self._bank is not None:
            self._bank.save_scores(scores, self._oldest(self._bank, 1))

    def _work(self, stage: str, work: Callable[[], T]) -> T:
        return self._timed(stage, self._store.live_version, work, self._counters)

    @property
    def _counters(self) -> dict[str, float]:
        return {"version": self._store.live_version, "scored": len(self._offered)}

    def close(self) -> None:
        self._source.close()
        if self._bank is not None:
            self._bank.close()
        super().close()
        self._steps.close()
