"""The rollout's side: admission of groups, places for episodes, episodes turn by turn.

Invariants: the rule of admission is the product's own (`rollout.admission`); at most `concurrency` episodes run; a
trajectory's spans tile its sampled tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_async.rollout.admission import Admission, InPlay
from megatron_async.simulation.engines import Engine, Request
from megatron_async.simulation.events import Clock
from megatron_async.simulation.scenario import Scenario
from megatron_async.simulation.workload import Episode


@dataclass(slots=True)
class Play:
    """One trajectory. actions: (version, sampled tokens). spans: (version, tokens up to the span's end, context
    included)."""

    episode: Episode
    group: Group
    arrived: float
    waited: float = 0.0
    start_version: int = 0
    cache_version: int = -1
    tokens: float = 0.0
    actions: list[tuple[int, float]] = field(default_factory=list)
    spans: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Group:
    """Members of one prompt. start_version: the engines' when it was admitted."""

    position: int
    start_version: int
    members: list[Play] = field(default_factory=list)
    unfinished: int = 0

    @property
    def min_version(self) -> int:
        return min(version for play in self.members for version, _ in play.actions)


@dataclass(slots=True)
class Progress:
    """What both sides know. version: the trainer's. outstanding: trajectories admitted and neither trained (their step
    committed) nor thrown away. stale: thrown away."""

    version: int = 0
    outstanding: int = 0
    stale: int = 0
    waiting: list[Group] = field(default_factory=list)


class Players:
    """Runs episodes on the engines and puts complete groups into `progress.waiting`, oldest prompt first.

    on_group: called whenever a group is complete.
    """

    def __init__(
        self,
        clock: Clock,
        scenario: Scenario,
        engines: list[Engine],
        progress: Progress,
        random: np.random.Generator,
        on_group: Callable[[], None],
    ) -> None:
        self._clock, self._scenario, self._engines = clock, scenario, engines
        self._progress, self._random, self._on_group = progress, random, on_group
        rollout = scenario.rollout
        self._admission: Admission | None = None
        if rollout.admission != "queue":  # which starts whenever there is a place
            self._admission = Admission(
                rollout.bound, rollout.groups, rollout.group_size, scenario.publish.every, rollout.admission
            )
        self._open: dict[int, Group] = {}
        self._queue: deque[Play] = deque()
        self._arrived: deque[float] = deque()
        self._positions = 0
        self._unfinished = 0
        self._running, self._since = 0, clock.now
        self.running_seconds = 0.0
        self.finished_tokens = 0.0
        if math.isfinite(rollout.arrivals_per_second):
            self._await_arrival()

    # ---------------------------------------------------------------- admission

    def admit(self) -> None:
        """Start the groups that may start now."""
        rollout = self._scenario.rollout
        slots = math.ceil((rollout.concurrency - self._unfinished) / rollout.group_size)
        for _ in range(max(0, int(min(slots, self._room(), self._prompts())))):
            self._open_group()

    def _room(self) -> float:
        if self._admission is None:
            return math.inf
        sampling = min(self._engines[0].version, self._progress.version)
        oldest = min((group.start_version for group in self._open.values()), default=None)
        running = len(self._open) * self._scenario.rollout.group_size
        waiting = self._progress.outstanding - running
        return self._admission.room(InPlay(self._progress.version, sampling, waiting, running, oldest))

    def _prompts(self) -> float:
        return len(self._arrived) if math.isfinite(self._scenario.rollout.arrivals_per_second) else math.inf

    def _await_arrival(self) -> None:
        seconds = float(self._random.exponential(1.0 / self._scenario.rollout.arrivals_per_second))
        self._clock.after(seconds, self._arrive)

    def _arrive(self) -> None:
        self._arrived.append(self._clock.now)
        self._await_arrival()
        self.admit()

    def _open_group(self) -> None:
        size = self._scenario.rollout.group_size
        arrived = self._arrived.popleft() if self._arrived else self._clock.now
        group = Group(self._positions, self._engines[0].version, unfinished=size)
        self._positions += 1
        self._open[group.position] = group
        self._unfinished += size
        self._progress.outstanding += size
        for episode in self._scenario.workload.group(size, self._random):
            play = Play(episode, group, arrived)
            group.members.append(play)
            self._queue.append(play)
        self._fill_places()

    # ---------------------------------------------------------------- episodes

    def _fill_places(self) -> None:
        while self._queue and self._running < self._scenario.rollout.concurrency:
            play = self._queue.popleft()
            self._change_running(1)
            play.waited = self._clock.now - play.arrived
            play.start_version = self._engines[0].version
            self._clock.after(play.episode.reset_seconds, lambda play=play: self._begin_turn(play, 0))  # type: ignore[misc]

    def _begin_turn(self, play: Play, number: int) -> None:
        before = self._scenario.engines.request_seconds / 2
        self._clock.after(before, lambda: self._submit(play, number))

    def _submit(self, play: Play, number: int) -> None:
        turn = play.episode.turns[number]
        engine = min(self._engines, key=lambda engine: engine.running)
        cached = play.tokens if play.cache_version == engine.version else 0.0
        context = play.tokens - cached + turn.context
        play.tokens += turn.context

        def done(spans: list[tuple[int, float]]) -> None:
            play.cache_version = engine.version
            for version, tokens in spans:
                play.tokens += tokens
                play.actions.append((version, tokens))
                play.spans.append((version, play.tokens))
            after = self._scenario.engines.request_seconds / 2 + turn.tool_seconds
            self._clock.after(after, lambda: self._after_tool(play, number))

        engine.submit(Request(int(cached), int(context), turn.actions, done))

    def _after_tool(self, play: Play, number: int) -> None:
        if number + 1 < len(play.episode.turns):
            self._begin_turn(play, number + 1)
            return
        self._change_running(-1)
        self._clock.after(self._scenario.rollout.recording, lambda: self._record(play))
        self._fill_places()

    def _record(self, play: Play) -> None:
        """The episode is in the bank."""
        self.finished_tokens += play.tokens
        group = play.group
        group.unfinished -= 1
        if group.unfinished == 0:
            del self._open[group.position]
            self._complete(group)
        self._clock.after(self._scenario.rollout.turnaround, self._seen)

    def _seen(self) -> None:
        """Admission notices that a member has ended."""
        self._unfinished -= 1
        self.admit()

    def _change_running(self, change: int) -> None:
        self.settle()
        self._running += change

    def settle(self) -> None:
        """Bring the counters up to now."""
        self.running_seconds += (self._clock.now - self._since) * self._running
        self._since = self._clock.now

    # ---------------------------------------------------------------- the bank

    def _complete(self, group: Group) -> None:
        waiting, rollout = self._progress.waiting, self._scenario.rollout
        waiting.append(group)
        if rollout.admission != "queue":  # which keeps the order of completion
            waiting.sort(key=lambda waits: waits.position)
        else:
            while len(waiting) * rollout.group_size > rollout.queue:
                self._throw_away(waiting[0])
        self._on_group()

    @property
    def ready(self) -> int:
        """Complete groups that may be taken: in mode "window", those with few enough older ones still open."""
        rollout, waiting = self._scenario.rollout, self._progress.waiting
        if rollout.admission != "window" or len(self._open) <= rollout.window:
            return len(waiting)
        last = sorted(self._open)[rollout.window]
        return sum(group.position < last for group in waiting)

    def take_batch(self) -> list[Group] | None:
        """The oldest complete groups, none with a token older than the bound; None while fewer may be taken."""
        rollout, progress = self._scenario.rollout, self._progress
        if rollout.admission != "queue":
            oldest = progress.version - rollout.bound
            for group in [group for group in progress.waiting if group.min_version < oldest]:
                self._throw_away(group)
        if self.ready < rollout.groups:
            return None
        batch, progress.waiting[:] = progress.waiting[: rollout.groups], progress.waiting[rollout.groups :]
        return batch

    def _throw_away(self, group: Group) -> None:
        self._progress.waiting.remove(group)
        self._progress.outstanding -= len(group.members)
        self._progress.stale += len(group.members)
