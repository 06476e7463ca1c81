"""Admission: the bound on staleness holds where tokens are consumed, and nobody is starved."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.rollout.admission import LengthBias, StalenessAdmission


def test_after_a_resume_at_version_100_twelve_may_start_and_not_412() -> None:
    """Field bug 6: batch 4, bound 2."""
    assert StalenessAdmission(bound=2, batch=4, start_version=100).capacity(100, accepted=0, running=0) == 12
    assert StalenessAdmission(bound=2, batch=4).capacity(100, accepted=0, running=0) == 412


@pytest.mark.parametrize(
    ("version", "accepted", "running", "expected"),
    [(10, 0, 0, 24), (10, 10, 14, 0), (11, 8, 16, 8), (12, 24, 8, 8), (10, 30, 30, 0)],
)
def test_capacity_counts_what_waits_and_what_runs(
    version: int, accepted: int, running: int, expected: int
) -> None:
    admission = StalenessAdmission(bound=2, batch=8, start_version=10)
    assert admission.capacity(version, accepted, running) == expected


def test_bound_zero_is_synchronous() -> None:
    admission = StalenessAdmission(bound=0, batch=8)
    assert admission.capacity(0, 0, 0) == 8
    assert admission.capacity(0, 8, 0) == 0
    assert admission.capacity(1, 8, 0) == 8


def test_whole_groups_only() -> None:
    admission = StalenessAdmission(bound=1, batch=12)
    assert admission.groups(0, accepted=0, running=0, group_size=4) == 6
    assert admission.groups(0, accepted=3, running=0, group_size=4) == 5
    assert admission.groups(0, accepted=21, running=0, group_size=4) == 0


def test_a_long_trajectory_is_waited_for_and_not_overtaken() -> None:
    """Field bug 7. At version 3, a trajectory of version 1 still runs: everything admitted must fit into the batches
    up to 1 + bound, the last of which then cannot be filled without it."""
    admission = StalenessAdmission(bound=2, batch=4)
    assert admission.capacity(3, accepted=12, running=1) == 11
    assert admission.capacity(3, accepted=12, running=1, oldest_running=1) == 3
    assert admission.capacity(3, accepted=15, running=1, oldest_running=1) == 0


def test_a_trajectory_beyond_its_bound_holds_nobody_back() -> None:
    admission = StalenessAdmission(bound=2, batch=4)
    assert admission.capacity(5, 20, 1, oldest_running=2) == admission.capacity(5, 20, 1) == 11


def test_publishing_every_n_steps_needs_a_bound_of_n_minus_one() -> None:
    StalenessAdmission(bound=7, batch=4, publish_every=8)
    with pytest.raises(ValueError, match="max_staleness=6 is too small for publishing every 8 steps"):
        StalenessAdmission(bound=6, batch=4, publish_every=8)


def test_versions_below_the_start_are_refused() -> None:
    with pytest.raises(ValueError, match="version 4 is below start_version 5"):
        StalenessAdmission(bound=1, batch=4, start_version=5).capacity(4, 0, 0)


@pytest.mark.parametrize("wrong", [{"bound": -1}, {"batch": 0}, {"start_version": -1}, {"publish_every": 0}])
def test_arguments_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        StalenessAdmission(**{"bound": 1, "batch": 4, **wrong})


def test_length_bias() -> None:
    bias = LengthBias()
    assert bias.ratio == 1.0
    for length in (10, 20):
        bias.keep(length)
    bias.drop(60)
    assert (bias.kept_mean, bias.dropped_mean, bias.ratio) == (15.0, 60.0, 4.0)
    assert bias.as_dict()["dropped_over_kept"] == 4.0


@dataclass
class _Play:
    """One group: the version it started at, when it ends, and whether it finished, was taken, or failed."""

    start: int
    ends: int
    fails: bool


@dataclass
class _Run:
    """A whole run by stub clock: rollout and trainer act in an arbitrary order, engines publish every n-th version.

    The trainer takes the oldest finished groups, as the bank does, and never waits for a running one.
    """

    admission: StalenessAdmission
    groups: int
    size: int
    publish_every: int
    clock: int = 0
    version: int = 0
    running: list[_Play] = field(default_factory=list)
    ready: list[_Play] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)

    @property
    def engine_version(self) -> int:
        start = self.admission.start_version
        return max(start, self.version - self.version % self.publish_every)

    def admit(self, durations: list[int], fails: list[bool]) -> int:
        room = self.admission.groups(
            self.engine_version,
            self.admission.consumed(self.version) + len(self.ready) * self.size,
            len(self.running) * self.size,
            self.size,
            min((play.start for play in self.running), default=None),
        )
        for duration, fail in zip(durations[:room], fails, strict=False):
            self.running.append(_Play(self.engine_version, self.clock + duration, fail))
        return room

    def tick(self) -> None:
        self.clock += 1
        ended = [play for play in self.running if play.ends <= self.clock]
        self.running = [play for play in self.running if play.ends > self.clock]
        self.ready += [play for play in ended if not play.fails]
        self.ready.sort(key=lambda play: play.start)

    def train(self) -> bool:
        if len(self.ready) < self.groups:
            return False
        batch, self.ready = self.ready[: self.groups], self.ready[self.groups :]
        self.gaps += [self.version - play.start for play in batch]
        self.version += 1
        return True


@settings(max_examples=200, deadline=None)
@given(
    bound=st.integers(0, 4),
    publish_every=st.integers(1, 3),
    groups=st.integers(1, 4),
    start=st.sampled_from(
        [0, 6, 102]
    ),  # multiples of every publish_every: the version resumed at is published
    seed=st.integers(0, 2**32),
)
def test_no_schedule_exceeds_the_bound_and_none_stops_the_run(
    bound: int, publish_every: int, groups: int, start: int, seed: int
) -> None:
    """Long tails, failures, lag-n publishing, any order of events: every gap consumed stays within the bound, and the
    run goes on (field bugs 5, 6, 7, 34)."""
    bound, draw = max(bound, publish_every - 1), random.Random(seed)
    admission = StalenessAdmission(bound, groups * 2, start, publish_every)
    run = _Run(admission, groups, size=2, publish_every=publish_every, version=start)
    for _ in range(300):
        action = draw.choice(["admit", "tick", "train"])
        if action == "admit":
            run.admit(draw.choices([1, 2, 3, 40], k=20), draw.choices([True, False], k=20))
        elif action == "tick":
            run.tick()
        else:
            run.train()
    before = run.version
    for _ in range(100):  # from here on everybody works: the run must move
        run.admit([1] * 20, [False] * 20)
        run.tick()
        run.train()
    assert run.version > before
    assert max(run.gaps) <= bound


def test_without_the_rule_for_long_trajectories_the_bound_is_exceeded() -> None:
    """The property test can fail: the same run without `oldest_running` trains a token that is too old."""

    class Blind(StalenessAdmission):
        def capacity(
            self, version: int, accepted: int, running: int, oldest_running: int | None = None
        ) -> int:
            return StalenessAdmission.capacity(self, version, accepted, running)

    gaps = {}
    for kind in (StalenessAdmission, Blind):
        run = _Run(kind(1, 4), groups=2, size=2, publish_every=1)
        run.admit([12] + [1] * 19, [False] * 20)
        for _ in range(20):
            run.tick()
            run.train()
            run.admit([1] * 20, [False] * 20)
        gaps[kind] = max(run.gaps)
    assert gaps[StalenessAdmission] <= 1 < gaps[Blind]
