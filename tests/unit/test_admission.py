"""Admission: the bound on staleness holds where tokens are consumed, and nobody is starved."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.bank.lineage import Lineage
from megatron_async.config import ConfigError, check, load
from megatron_async.rollout.admission import MODES, UNLIMITED, Admission, InPlay, LengthBias
from tests.unit.configs import write_config


def at(version: int, waiting: int = 0, running: int = 0, oldest: int | None = None, trainer: int = -1) -> InPlay:
    """Everything at one version, unless the trainer is ahead of the engines."""
    return InPlay(max(version, trainer), version, waiting, running, oldest)


def test_after_a_resume_at_version_100_twelve_may_start_and_not_412() -> None:
    """Field bug 6: batch 4, bound 2."""
    assert Admission(bound=2, groups=2, group_size=2).capacity(at(100)) == 12


@pytest.mark.parametrize(
    ("waiting", "running", "expected"), [(0, 0, 24), (10, 14, 0), (0, 16, 8), (8, 8, 8), (30, 30, 0)]
)
def test_capacity_counts_what_waits_and_what_runs(waiting: int, running: int, expected: int) -> None:
    assert Admission(bound=2, groups=4, group_size=2).capacity(at(10, waiting, running)) == expected


def test_bound_zero_is_synchronous() -> None:
    admission = Admission(bound=0, groups=4, group_size=2)
    assert admission.capacity(at(0)) == 8
    assert admission.capacity(at(0, waiting=8)) == 0
    assert admission.capacity(at(1)) == 8


def test_whole_groups_only() -> None:
    admission = Admission(bound=1, groups=3, group_size=4)
    assert admission.room(at(0)) == 6
    assert admission.room(at(0, waiting=3)) == 5
    assert admission.room(at(0, waiting=21)) == 0


def test_engines_that_lag_behind_the_trainer_count_against_the_bound() -> None:
    admission = Admission(bound=2, groups=1, group_size=4, publish_every=3)
    assert [admission.capacity(at(7, trainer=trainer)) for trainer in (7, 8, 9)] == [12, 8, 4]


def test_a_long_trajectory_is_waited_for_and_not_overtaken() -> None:
    """Field bug 7. At version 3, a trajectory of version 1 still runs: everything admitted must fit into the batches
    up to 1 + bound, the last of which then cannot be filled without it."""
    admission = Admission(bound=2, groups=2, group_size=2)
    assert admission.capacity(at(3, running=1)) == 11
    assert admission.capacity(at(3, running=1, oldest=1)) == 3
    assert admission.capacity(at(3, waiting=3, running=1, oldest=1)) == 0


def test_a_trajectory_beyond_its_bound_holds_nobody_back() -> None:
    admission = Admission(bound=2, groups=2, group_size=2)
    assert admission.capacity(at(5, running=1, oldest=2)) == admission.capacity(at(5, running=1)) == 11
    # The trainer decides what is beyond: here it is ahead of the engines by one.
    assert admission.capacity(at(4, running=1, oldest=2, trainer=5)) == 7


def test_publishing_every_n_steps_needs_a_bound_of_n_minus_one() -> None:
    Admission(bound=7, groups=4, group_size=1, publish_every=8)
    with pytest.raises(ValueError, match="max_staleness=6 is too small for publishing every 8 steps"):
        Admission(bound=6, groups=4, group_size=1, publish_every=8)


@pytest.mark.parametrize(
    "wrong", [{"bound": -1}, {"groups": 0}, {"group_size": 0}, {"publish_every": 0}, {"over_sampling": -0.5}]
)
def test_arguments_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Admission(**{"bound": 1, "groups": 4, "group_size": 1, **wrong})  # type: ignore[arg-type]


# ---------------------------------------------------------------- modes


def test_an_unknown_mode_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'drag' is none of throttle, drop, wait, window"):
        Admission(1, 1, 1, mode="drag")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"admission": "drag"}, "rollout.admission: .*throttle.*drop.*wait.*window"),
        ({"window": 2}, "rollout.window: 2 is only read with rollout.admission window"),
        ({"admission": "window", "window": -1}, "rollout.window: -1"),
        ({"over_sampling": -0.5}, "rollout.over_sampling: -0.5"),
        ({"admission": "drop", "over_sampling": 0.5}, "rollout.over_sampling: 0.5 has no meaning with .* drop"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(
    tmp_path: Path, rollout: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(load(write_config(tmp_path, rollout=rollout)))


def test_drop_never_holds_back() -> None:
    assert Admission(0, 2, 2, mode="drop").room(at(9, waiting=1000, running=1000, oldest=0)) == UNLIMITED


def test_wait_starts_a_round_when_the_last_one_is_trained() -> None:
    admission = Admission(bound=1, groups=2, group_size=2, mode="wait")
    assert admission.room(at(5)) == 4
    assert admission.room(at(5, running=1)) == 0
    assert admission.room(at(6, waiting=4)) == 0  # a batch of the round is still to be trained
    assert admission.room(at(6, waiting=2)) == 3  # less than a batch is left: filtered or given up
    assert admission.room(at(5, trainer=6)) == 2  # the engines hold the version before


def test_window_starts_what_throttle_starts() -> None:
    for now in (at(3), at(3, 3, 1, oldest=1), at(5, running=1, oldest=2)):
        assert Admission(2, 2, 2, mode="window").room(now) == Admission(2, 2, 2).room(now)


# ---------------------------------------------------------------- over-sampling


def test_over_sampling_starts_a_share_more() -> None:
    admission = Admission(bound=0, groups=4, group_size=2, over_sampling=0.3)
    assert admission.extra == 2
    assert admission.room(at(0)) == 6
    assert admission.room(at(0, running=12)) == 0
    assert admission.room(at(0, trainer=1)) == 0, "where nothing may start, nothing is over-sampled either"


def test_the_slowest_are_dropped_when_the_batch_is_full() -> None:
    admission = Admission(bound=0, groups=4, group_size=2, over_sampling=0.5)
    before = at(0, waiting=6, running=6)
    assert admission.surplus(before, 0, waiting=0, running=4) == 0
    assert admission.surplus(before, 1, waiting=0, running=4) == 2
    assert admission.surplus(before, 1, waiting=2, running=2) == 1  # the other one has finished, and may wait
    assert Admission(bound=0, groups=4, group_size=2).surplus(before, 1, waiting=0, running=4) == 0


def test_with_a_bound_only_what_is_left_over_is_dropped() -> None:
    admission = Admission(bound=1, groups=4, group_size=1, over_sampling=0.25)
    before = at(3, waiting=4, running=5)  # two batches and one more group
    assert admission.surplus(before, 1, waiting=0, running=5) == 1
    assert admission.surplus(before, 1, waiting=0, running=4) == 0  # one was given up meanwhile
    assert admission.surplus(at(3, trainer=4, waiting=4, running=1), 1, waiting=0, running=1) == 1


def test_length_bias() -> None:
    bias = LengthBias()
    assert bias.ratio == 1.0
    for length in (10, 20):
        bias.keep(length)
    bias.drop(60)
    assert (bias.kept_mean, bias.dropped_mean, bias.ratio) == (15.0, 60.0, 4.0)
    assert bias.as_dict()["dropped_over_kept"] == 4.0


# ---------------------------------------------------------------- whole runs, with resumes


@dataclass
class _Play:
    """One group. number: order of start. tokens: the versions that sampled it. oldest: as the controller knows it."""

    number: int
    tokens: set[int]
    oldest: int
    ends: int
    fails: bool


@dataclass
class _Run:
    """A whole run by stub clock: rollout, trainer and kills in an arbitrary order, engines get every n-th version.

    The trainer takes the oldest finished groups, as the bank does. `checkpoint`: (version, steps) that a kill goes back
    to; steps trained since then are on record and trained again, with the engines as they are.
    """

    admission: Admission
    window: int | None = None
    clock: int = 0
    version: int = 0
    engine: int = 0
    made: int = 0
    line: Lineage = field(default_factory=Lineage)
    running: list[_Play] = field(default_factory=list)
    ready: list[_Play] = field(default_factory=list)
    recorded: list[list[_Play]] = field(default_factory=list)
    steps: int = 0
    checkpoint: tuple[int, int] = (0, 0)
    gaps: list[int] = field(default_factory=list)
    stale: int = 0

    @property
    def catching_up(self) -> bool:
        return self.steps < len(self.recorded)

    def now(self) -> InPlay:
        trainer = self.line.updates(self.version)
        sampling = min(self.line.updates(self.engine), trainer)
        for play in self.running:
            play.oldest = min(play.oldest, sampling)
        size = self.admission.group_size
        waiting = len(self.ready) + sum(map(len, self.recorded[self.steps :]))
        oldest = min((play.oldest for play in self.running), default=None)
        return InPlay(trainer, sampling, waiting * size, len(self.running) * size, oldest)

    def admit(self, durations: list[int], fails: list[bool]) -> int:
        now = self.now()
        room = self.admission.room(now)
        for duration, fail in zip(durations[:room], fails, strict=False):
            self.running.append(_Play(self.made, set(), now.sampling, self.clock + duration, fail))
            self.made += 1
        return room

    def tick(self) -> None:
        self.clock += 1
        for play in self.running:
            play.tokens.add(self.engine)
        ended = [play for play in self.running if play.ends <= self.clock]
        self.running = [play for play in self.running if play.ends > self.clock]
        self.ready += [play for play in ended if not play.fails]
        self.ready.sort(key=lambda play: play.number)

    def age(self, play: _Play) -> int:
        return max(0, *(self.line.updates(self.version) - self.line.updates(token) for token in play.tokens))

    def train(self, filtered: int = 0, update: bool = True) -> bool:
        """filtered: groups without variance that make room first. update: False for a step without any signal."""
        if self.catching_up:
            self._step(update)
            return True
        fresh = [play for play in self.ready if self.age(play) <= self.admission.bound]
        self.stale += len(self.ready) - len(fresh)
        self.ready = fresh[min(filtered, len(fresh)) :]
        allowed = self.ready
        if self.window is not None:
            still = [play.number for play in self.running]
            allowed = [p for p in allowed if sum(number < p.number for number in still) <= self.window]
        batch = allowed[: self.admission.groups]
        if len(batch) < self.admission.groups:
            return False
        self.ready = [play for play in self.ready if play not in batch]
        self.gaps += [self.age(play) for play in batch]
        self.recorded.append(batch)
        self._step(update)
        return True

    def _step(self, update: bool) -> None:
        was_catching_up = self.steps + 1 < len(self.recorded)
        if update:
            made = self.line.newest + 1
            self.line.add(made, self.version)
            self.version = made
        self.steps += 1
        if not was_catching_up and update and self.version % self.admission.publish_every == 0:
            self.engine = self.version

    def save(self) -> None:
        self.checkpoint = self.version, self.steps

    def kill(self, while_publishing: bool) -> None:
        """while_publishing: after the next version was recorded and published, before its step was committed."""
        if while_publishing and not self.catching_up:
            made = self.line.newest + 1
            self.line.add(made, self.version)
            self.engine = made
        self.version, self.steps = self.checkpoint
        if not self.catching_up:
            self.engine = self.version

    def catch_up(self, update: bool = True) -> None:
        """The repeated steps; then the engines get what came of them."""
        if self.catching_up:
            while self.catching_up:
                self._step(update)
            self.engine = self.version


SCHEDULES = {
    "bound": st.integers(0, 4),
    "publish_every": st.integers(1, 3),
    "groups": st.integers(1, 4),
    "seed": st.integers(0, 2**32),
}


def disturbed(run: _Run, draw: random.Random, kills: bool) -> None:
    """100 events in any order: long tails, failures, filtered groups, steps without update, kills of the trainer."""
    for _ in range(100):
        action = draw.choice(["admit", "tick", "train", *(["save", "kill", "catch up"] if kills else [])])
        if action == "admit":
            run.admit(draw.choices([1, 2, 3, 40], k=20), draw.choices([True, False], k=20))
        elif action == "tick":
            run.tick()
        elif action == "train":
            run.train(filtered=draw.choice([0, 0, 1]), update=draw.random() < 0.8)
        elif action == "save":
            run.save()
        elif action == "catch up":
            run.catch_up()
        elif draw.random() < 0.3:
            run.kill(draw.random() < 0.5)


def goes_on(run: _Run) -> None:
    """From here on everybody works: the run must move, far enough to have used up what was ready."""
    before = run.steps
    run.catch_up()
    for _ in range(60):
        run.admit([1] * 20, [False] * 20)
        now = run.now()
        assert run.admission.room(now) or now.running or now.waiting >= run.admission.batch, "nothing is left to happen"
        run.tick()
        run.train()
    assert run.steps > max(before, len(run.recorded) - 1) and len(run.recorded) > 5


@settings(max_examples=15, deadline=None)
@given(mode=st.sampled_from(MODES), window=st.integers(0, 2), **SCHEDULES)
def test_no_history_of_resumes_stops_the_run_or_exceeds_the_bound(
    mode: str, window: int, bound: int, publish_every: int, groups: int, seed: int
) -> None:
    """Ids run ahead of updates, groups fail, are filtered or go stale: what is consumed stays within the bound, and
    the run goes on."""
    bound, draw = max(bound, publish_every - 1), random.Random(seed)
    admission = Admission(bound, groups, 2, publish_every, mode)  # type: ignore[arg-type]
    run = _Run(admission, window if mode == "window" else None)
    disturbed(run, draw, kills=True)
    goes_on(run)
    assert max(run.gaps) <= bound


@settings(max_examples=15, deadline=None)
@given(mode=st.sampled_from(["throttle", "window"]), window=st.integers(0, 2), **SCHEDULES)
def test_without_kills_nothing_that_was_admitted_goes_stale(
    mode: str, window: int, bound: int, publish_every: int, groups: int, seed: int
) -> None:
    """What is admitted fits under the bound, queue time included, whatever is long, fails or is filtered;
    a group that outlives its bound while it runs is the exception."""
    bound, draw = max(bound, publish_every - 1), random.Random(seed)
    run = _Run(Admission(bound, groups, 2, publish_every, mode), window if mode == "window" else None)  # type: ignore[arg-type]
    for _ in range(100):
        action = draw.choice(["admit", "tick", "train"])
        if action == "admit":
            run.admit(draw.choices([1, 2, 3, 5], k=20), draw.choices([True, False], k=20))
        elif action == "tick":
            run.tick()
        elif not any(run.age(play) >= bound for play in run.running if play.tokens):
            run.train(filtered=draw.choice([0, 0, 1]), update=draw.random() < 0.8)
    goes_on(run)
    assert run.stale == 0 and max(run.gaps, default=0) <= bound


def test_lag_n_publishing_goes_on_after_a_resume_with_a_gap_in_the_ids() -> None:
    """The run resumed at 2 after 10 versions were made; its next one, 11, is not published. In ids, the engines then
    lag by nine."""
    run = _Run(Admission(bound=1, groups=1, group_size=1, publish_every=2))
    for version in range(1, 11):
        run.line.add(version, version - 1)
    run.version = run.engine = 2
    goes_on(run)
    assert max(run.gaps) <= 1


def test_a_group_of_a_lost_version_still_holds_the_younger_ones_back() -> None:
    """By ids, 3 lies far below 12 - 2, and nobody would wait for it."""
    run = _Run(Admission(bound=2, groups=1, group_size=1))
    for version in range(1, 11):
        run.line.add(version, version - 1)
    run.version = run.engine = 3
    run.admit([3], [False])
    for _ in range(20):
        run.tick()
        run.train()
        run.admit([1] * 20, [False] * 20)
    assert run.stale == 0 and len(run.recorded) > 5


def test_without_the_rule_for_long_trajectories_the_bound_is_exceeded() -> None:
    """The property test can fail: the same run without `oldest_running` lets a token grow too old."""

    class Blind(Admission):
        def _limit(self, now: InPlay) -> int:
            return Admission._limit(self, InPlay(now.trainer, now.sampling, now.waiting, now.running))

    stale = {}
    for kind in (Admission, Blind):
        run = _Run(kind(bound=1, groups=2, group_size=2))
        run.admit([12] + [1] * 19, [False] * 20)
        for _ in range(20):
            run.tick()
            run.train()
            run.admit([1] * 20, [False] * 20)
        stale[kind] = run.stale
    assert stale[Admission] == 0 < stale[Blind]
