"""Who may start, so that no token is too old when it is trained: pure arithmetic, no clock, no bank.

Invariants
- A trajectory admitted under `throttle` while the engines sample with version v can be in the batch that is trained
  at version v + bound at the latest, queue time included, as long as the trainer takes complete groups oldest first:
  everything that is ahead in the queue is counted, not a trajectory's age when it is dispatched.
- Work that was started is not thrown away because it is long: while a long trajectory runs, its version is what
  admission counts from, so that younger ones cannot overtake it beyond the bound.
- Nobody waits for ever: whenever nothing may start, something runs, or a whole batch waits to be taken.

Versions are counted in updates along the lineage (`bank.lineage`), never in ids, which run ahead of the updates
once a run was resumed. Symbols: B = trajectories per trainer step (`groups * group_size`). An update consumes B
trajectories, so what was accepted before the trainer's version t is t * B, whatever was lost, filtered or repeated on
the way. With lag-n publishing the engines sample with the last published version, up to n - 1 updates behind the
trainer's; that lag is part of the staleness and has to fit into the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Mode = Literal["throttle", "drop", "wait", "window"]
MODES: tuple[Mode, ...] = get_args(Mode)

UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class InPlay:
    """What is under way at one moment. A group that is kept without some of its members counts as if it had them all:
    it takes the place of a group in a batch.

    trainer, sampling: updates behind the trainer's version and behind the oldest that an engine samples with,
    sampling <= trainer. waiting: trajectories finished and not yet trained, those of the step in progress included.
    running: trajectories started and not finished, members that still wait for a slot included. oldest_running: updates
    behind the oldest version that may have sampled a token of a running trajectory, None while none runs.
    """

    trainer: int
    sampling: int
    waiting: int = 0
    running: int = 0
    oldest_running: int | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """Which groups start, and which are dropped, under a bound on staleness.

    bound: largest allowed (trainer's version when a token is trained) - (version that sampled it) in updates, >= 0; 0
    is synchronous. groups, group_size: of one batch. publish_every: n, trainer steps per publishing, >= 1. mode:
    `throttle` starts what will be trained within the bound; `window` likewise (its batches are formed in the order of
    start, see `Bank.take_batch`); `wait` starts whole rounds of what the bound has room for, the next one when the last
    has been trained; `drop` starts always, and what is too old when a batch is built is dropped there. over_sampling:
    share of a batch's groups that are started beyond what it needs.

    Raises ValueError when bound < n - 1: the engines' version would reach the bound before the next publishing, and
    trainer and rollout would wait for each other for ever.

    >>> Admission(bound=2, groups=2, group_size=2).room(InPlay(trainer=100, sampling=100, running=4))
    4
    """

    bound: int
    groups: int
    group_size: int
    publish_every: int = 1
    mode: Mode = "throttle"
    over_sampling: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (
            ("bound", 0), ("groups", 1), ("group_size", 1), ("publish_every", 1), ("over_sampling", 0)
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} is none of {', '.join(MODES)}")
        if self.bound < self.publish_every - 1:
            raise ValueError(
                f"max_staleness={self.bound} is too small for publishing every {self.publish_every} steps: engines lag "
                f"up to {self.publish_every - 1} versions behind; set rollout.max_staleness to at least that"
            )

    @property
    def batch(self) -> int:
        """B, trajectories per trainer step."""
        return self.groups * self.group_size

    @property
    def extra(self) -> int:
        """Groups that are started for a batch beyond those it needs."""
        return math.ceil(self.over_sampling * self.groups)

    def capacity(self, now: InPlay) -> int:
        """How many trajectories may start now under the bound (>= 0), over-sampling left out.

        (bound + version + 1) * B - (accepted + running), where version is the engines' and accepted is what was trained
        up to the trainer's version, trainer * B, and what waits. While an older trajectory runs, version is its own:
        everything admitted then fits into the batches up to its version + bound, the last of which cannot be filled
        without it. A trajectory that is beyond the bound already is past help and holds nobody back.
        """
        return max(0, self._limit(now) - now.waiting - now.running)

    def _limit(self, now: InPlay) -> int:
        version = now.sampling
        if now.oldest_running is not None and now.oldest_running >= now.trainer - self.bound:
            version = min(version, now.oldest_running)
        return (self.bound + version - now.trainer + 1) * self.batch

    def room(self, now: InPlay) -> int:
        """How many whole groups may start now; `UNLIMITED` in mode `drop`."""
        if self.mode == "drop":
            return UNLIMITED
        if self.mode == "wait" and (now.running or now.waiting >= self.batch):
            return 0
        limit = self._limit(now)
        more = self.extra * self.group_size if limit > 0 else 0
        return max(0, limit + more - now.waiting - now.running) // self.group_size

    def surplus(self, before: InPlay, batches: int, waiting: int, running: int) -> int:
        """How many running groups to drop, the oldest first, now that batches were taken.

        before: what was in play before that. batches: taken since. waiting, running: trajectories that are left, those
        of a step in progress left out. What was started beyond the needs of these batches and still runs is the slowest
        of what was started for them. 0 without over-sampling.
        """
        if not self.extra or batches < 1:
            return 0
        wanted = max(0, self.bound + before.sampling - before.trainer + 1 - batches) * self.groups
        left = math.ceil((waiting + running) / self.group_size)
        return max(0, min(left - wanted, self.extra * batches, math.ceil(running / self.group_size)))


@dataclass(slots=True)
class LengthBias:
    """Are long trajectories lost more often than short ones? Lengths are action tokens.

    Kept: finished, and trained or waiting for it. Dropped: failed, given up with their group, among the slowest when
    more were started than a batch needs, or set aside by the bank (too old when a batch was built, surplus, no signal).
    A ratio of mean lengths dropped/kept far above 1 says that the limits (deadlines, staleness, over-sampling) select
    for short answers.
    """

    kept: int = 0
    dropped: int = 0
    kept_tokens: int = 0
    dropped_tokens: int = 0

    def keep(self, length: int) -> None:
        self.kept += 1
        self.kept_tokens += length

    def drop(self, length: int) -> None:
        self.dropped += 1
        self.dropped_tokens += length

    def take_back(self, length: int) -> None:
        """What was kept is dropped after all."""
        self.kept -= 1
        self.kept_tokens -= length
        self.drop(length)

    @property
    def kept_mean(self) -> float:
        return self.kept_tokens / self.kept if self.kept else 0.0

    @property
    def dropped_mean(self) -> float:
        return self.dropped_tokens / self.dropped if self.dropped else 0.0

    @property
    def ratio(self) -> float:
        """Mean length dropped / kept; 1.0 while nothing was dropped or nothing kept (no evidence of a bias)."""
        return self.dropped_mean / self.kept_mean if self.dropped and self.kept_tokens else 1.0

    def as_dict(self) -> dict[str, float]:
        return {
            "kept": self.kept,
            "dropped": self.dropped,
            "kept_mean_tokens": self.kept_mean,
            "dropped_mean_tokens": self.dropped_mean,
            "dropped_over_kept": self.ratio,
        }
