"""What a rollout has done and is doing, as numbers; and how late its event loop is.

Invariants: a finished trajectory is counted once, a failed one once under its kind; nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_async.bank import State
from megatron_async.rollout.admission import LengthBias
from megatron_async.rollout.agent_loop import EpisodeProgress
from megatron_async.trajectory import Trajectory

_RATE_WINDOW_S = 10.0
_RECENT = 256
_LAG_INTERVAL_S = 0.05
_SETTLED = (State.TRAINED, State.STALE, State.FILTERED)


@dataclass(slots=True)
class RolloutCounters:
    """Totals since this process started.

    finished: trajectories with status ok or truncated. failed: the others, by kind (the episode's `ending`).
    retried: attempts made again. continued, restarted: episodes that a killed rollout left under way, and that went on
    where they were or began anew. groups_finished: groups that may be trained; groups_partial: those of them that lack
    members. groups_abandoned: groups given up because a member failed too often; groups_dropped: as the slowest, with
    over-sampling. consecutive_abandoned: since a trajectory last finished. generated_tokens: tokens sampled, those of
    failed attempts included. lengths: kept and dropped lengths.
    """

    finished: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    continued: int = 0
    restarted: int = 0
    groups_finished: int = 0
    groups_partial: int = 0
    groups_abandoned: int = 0
    groups_dropped: int = 0
    consecutive_abandoned: int = 0
    generated_tokens: int = 0
    last_failure: str = ""
    lengths: LengthBias = field(default_factory=LengthBias)
    _waiting: dict[str, dict[str, int]] = field(default_factory=dict)  # group, trajectory, length
    _gaps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _rate: deque[tuple[float, int]] = field(default_factory=deque)

    def add_tokens(self, count: int) -> None:
        self.generated_tokens += count

    def record(self, trajectory: Trajectory, gaps: NDArray[np.int64]) -> None:
        """Count a finished attempt; gaps: updates between its action tokens' versions and the policy's, [actions]."""
        length = trajectory.num_action_tokens
        if trajectory.status.trainable:
            self.finished += 1
            self.consecutive_abandoned = 0
            self.lengths.keep(length)
            self._waiting.setdefault(trajectory.group_id, {})[trajectory.trajectory_id] = length
            if len(gaps):
                self._gaps.append((float(gaps.mean()), int(gaps.max())))
        else:
            self.failed[str(trajectory.info.get("ending", trajectory.status))] += 1
            self.last_failure = str(trajectory.info.get("failure", ""))
            self.lengths.drop(length)

    def record_abandoned(self, finished_lengths: Iterable[int]) -> None:
        """Count a group given up; finished_lengths: action tokens of the members that had finished."""
        self.groups_abandoned += 1
        self.consecutive_abandoned += 1
        self._take_back(finished_lengths)

    def record_dropped(self, finished_lengths: Iterable[int], cut_lengths: Iterable[int]) -> None:
        """Count a group dropped as surplus; cut_lengths: of the members that still ran, as far as they got."""
        self.groups_dropped += 1
        self._take_back(finished_lengths)
        for length in cut_lengths:
            self.lengths.drop(length)

    def _take_back(self, finished_lengths: Iterable[int]) -> None:
        for length in finished_lengths:
            self.lengths.take_back(length)

    def forget(self, group_id: str) -> None:
        """A group was given up, and its lengths were counted: what the bank will say of its members adds nothing."""
        self._waiting.pop(group_id, None)

    def waiting(self) -> list[str]:
        """Ids of the finished trajectories of which it is not known yet whether they are trained."""
        return [name for members in self._waiting.values() for name in members]

    def settle(self, states: Mapping[str, State]) -> None:
        """What the bank says has become of `waiting`: too old or not wanted when a batch was built is dropped."""
        for group, members in list(self._waiting.items()):
            for name in [name for name in members if states.get(name, State.FINISHED) in _SETTLED]:
                length = members.pop(name)
                if states[name] is not State.TRAINED:
                    self.lengths.take_back(length)
            if not members:
                del self._waiting[group]

    def tokens_per_second(self, now: float) -> float:
        """Mean rate over the last ten seconds of calls; `now` in seconds of any monotonic clock."""
        self._rate.append((now, self.generated_tokens))
        while len(self._rate) > 2 and self._rate[1][0] <= now - _RATE_WINDOW_S:
            self._rate.popleft()
        (start, before), (end, after) = self._rate[0], self._rate[-1]
        return (after - before) / (end - start) if end > start else 0.0

    def as_dict(self, now: float) -> dict[str, float]:
        """Flat numbers for the status file. Staleness is that of recently finished trajectories, in updates."""
        gaps = list(self._gaps)
        return {
            "generated_tokens": self.generated_tokens,
            "tokens_per_second": self.tokens_per_second(now),
            "finished": self.finished,
            "failed": sum(self.failed.values()),
            **{f"failed/{kind}": count for kind, count in sorted(self.failed.items())},
            "retried": self.retried,
            "continued": self.continued,
            "restarted": self.restarted,
            "groups_finished": self.groups_finished,
            "groups_partial": self.groups_partial,
            "groups_abandoned": self.groups_abandoned,
            "groups_dropped": self.groups_dropped,
            "staleness_mean": float(np.mean([mean for mean, _ in gaps])) if gaps else 0.0,
            "staleness_max": float(max((worst for _, worst in gaps), default=0)),
            **{f"length/{name}": value for name, value in self.lengths.as_dict().items()},
        }


class LoopLag:
    """How much later than asked the event loop wakes a sleeper; a blocking call anywhere shows up here."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=1200)  # the last minute

    async def measure(self) -> None:
        """Runs until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._lags.append(max(0.0, time.monotonic() - before - _LAG_INTERVAL_S))

    def p99_ms(self) -> float:
        """99th percentile of the last minute, in milliseconds; 0 before the first measurement."""
        return float(np.percentile(self._lags, 99)) * 1e3 if self._lags else 0.0


@dataclass(slots=True)
class Running:
    """An episode in progress: what it does, and since when (monotonic seconds)."""

    progress: EpisodeProgress
    since: float


def describe_waiting(running: Iterable[Running], now: float, admission: str) -> str:
    """One line on what everything waits for: running episodes by what they await, the oldest of them, admission."""
    episodes = list(running)
    kinds = Counter(episode.progress.waiting_for for episode in episodes)
    parts = [f"{count} wait for {what}" for what, count in kinds.most_common()]
    if episodes:
        parts.append(f"the oldest runs for {max(now - episode.since for episode in episodes):.0f} s")
    else:
        parts.append("no episode is running")
    return "; ".join([*parts, f"admission: {admission or 'open'}"])
