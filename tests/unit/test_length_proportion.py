"""What is trained has the lengths of what was played, however long the tail of lengths is.

A simulation without engines: virtual time, the real admission rule, the real bank. An episode takes as long as it has
tokens; the trainer takes a batch as soon as there is one, and makes the next version of it.
"""

from __future__ import annotations

import heapq
from pathlib import Path

import numpy as np
import pytest

from megatron_async.bank import Bank, State
from megatron_async.rollout.admission import Admission, InPlay
from megatron_async.trajectory import Status, Trajectory, VersionSpan
from tests.bank_support import running

BOUND, GROUPS, SIZE = 2, 2, 2
STEP_TIME = 60
UNTHROTTLED = 12  # groups that run at once where nothing holds them back


class Simulation:
    """lengths: of the members of each group, in the order in which groups are started."""

    def __init__(self, bank: Bank, lengths: np.ndarray, throttle: bool) -> None:
        self.bank, self.lengths, self.throttle = bank, lengths, throttle
        self.admission = Admission(BOUND, GROUPS, SIZE)
        self.now = self.version = self.step = self.started = 0
        self.training = False
        self.events: list[tuple[int, int, int]] = []  # when, group (-1: the trainer), member
        self.members: dict[int, int] = {}  # running ones of each group
        self.since: dict[int, int] = {}  # version at which each group started
        self.trained: list[int] = []

    def run(self) -> list[int]:
        """Lengths of what was trained, until nothing more can happen."""
        while True:
            self._train()
            self._start()
            if not self.events:
                return self.trained
            self.now, group, member = heapq.heappop(self.events)
            if group < 0:
                self._commit()
            else:
                self._finish(group, member)

    def _room(self) -> int:
        if not self.throttle:
            return UNTHROTTLED - len(self.members)
        counts = self.bank.counts()
        waiting = counts[State.FINISHED] + counts[State.RESERVED]
        oldest = min((self.since[group] for group in self.members), default=None)
        return self.admission.room(InPlay(self.version, self.version, waiting, counts[State.RUNNING], oldest))

    def _start(self) -> None:
        for _ in range(min(self._room(), len(self.lengths) - self.started)):
            group, self.started = self.started, self.started + 1
            self.bank.start_trajectories([self._trajectory(group, member) for member in range(SIZE)])
            self.members[group], self.since[group] = SIZE, self.version
            for member, length in enumerate(self.lengths[group]):
                heapq.heappush(self.events, (self.now + int(length), group, member))

    def _trajectory(self, group: int, member: int) -> Trajectory:
        return running(f"{group}.{member}", f"g{group}")

    def _finish(self, group: int, member: int) -> None:
        trajectory, length = self._trajectory(group, member), int(self.lengths[group][member])
        spans = [VersionSpan(self.since[group], 0, length)]
        trajectory.append_action([4] * length, [-0.5] * length, spans, "stop")
        trajectory.finish(Status.OK, float(member))
        self.bank.finish_trajectory(trajectory)
        self.members[group] -= 1
        if not self.members[group]:
            del self.members[group]

    def _train(self) -> None:
        if self.training:
            return
        batch = self.bank.take_batch(self.step, GROUPS, SIZE, self.version - BOUND)
        if batch is not None:
            self.trained += [trajectory.num_action_tokens for trajectory in batch]
            self.training = True
            heapq.heappush(self.events, (self.now + STEP_TIME, -1, 0))

    def _commit(self) -> None:
        self.bank.record_version(self.version + 1, self.version, self.step)
        self.bank.commit_step(self.step, self.version, self.version + 1)
        self.version, self.step, self.training = self.version + 1, self.step + 1, False


@pytest.mark.parametrize("throttle", [True, False])
def test_long_and_short_ones_are_kept_in_proportion_under_throttle(tmp_path: Path, throttle: bool) -> None:
    """And without the throttle they are not: what is long goes stale, which is what the throttle is for."""
    lengths = 20 + (30 * np.random.default_rng(4).pareto(1.2, (40, SIZE))).astype(int).clip(max=1000)
    assert lengths.max() > 10 * np.median(lengths)  # a real tail
    with Bank.open(f"sqlite:///{tmp_path}/bank.sqlite") as bank:
        trained = Simulation(bank, lengths, throttle).run()
        stale = bank.counts()[State.STALE]
    if throttle:
        assert stale == 0 and sorted(trained) == sorted(lengths.flatten().tolist())
    else:
        assert stale > 0 and np.mean(trained) < 0.9 * lengths.mean()
