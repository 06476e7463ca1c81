"""Plays the members of groups: one episode each, repeated under a budget, in `rollout.concurrency` places.

Invariants: a failed attempt is repeated as a new trajectory and is never a reward; an episode that was cut goes on
after what was written down of it, or begins anew where its environment then says something else.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_async.bank import State
from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from megatron_async.observe import Timeline
from megatron_async.rollout import environment_calls
from megatron_async.rollout.agent_loop import (
    Chat,
    EpisodeProgress,
    ReplayDiverged,
    environment_call,
    fail,
    run_episode,
)
from megatron_async.rollout.counters import RolloutCounters, Running
from megatron_async.rollout.environment_calls import EpisodeFailure
from megatron_async.rollout.environments.base import Task, TaskSource
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.rollout.group import Group
from megatron_async.rollout.ledger import Ledger
from megatron_async.rollout.sampling import training_sampling
from megatron_async.rollout.writing_down import Played
from megatron_async.trajectory import Trajectory
from sglang_bridge import EnginePool

logger = logging.getLogger(__name__)

_LONGEST_RETRY_PAUSE_S = 5.0
_HOPELESS_GROUPS = 8


class RolloutFailure(UserError):
    """No episode can be finished any more; the message says what kept failing."""


class Members:
    """The episodes that are played now.

    trainer_version, sampling_version: the trainer's version, and the one that tokens sampled from now on have at least.
    clock: monotonic seconds. playing, live: what runs, by trajectory id. pausing: members between two attempts.
    """

    def __init__(
        self,
        config: RunConfig,
        pool: EnginePool,
        source: TaskSource,
        chat: Chat,
        ledger: Ledger,
        counters: RolloutCounters,
        timeline: Timeline,
        clock: Callable[[], float],
        *,
        trainer_version: Callable[[], int],
        sampling_version: Callable[[], int],
    ) -> None:
        self._config, self._pool, self._source, self._chat = config, pool, source, chat
        self._ledger, self._counters, self._timeline, self._clock = ledger, counters, timeline, clock
        self._trainer_version, self._sampling_version = trainer_version, sampling_version
        self._limits = EpisodeLimits.from_config(config)
        self._sampling = training_sampling(config.rollout)
        self._slots = asyncio.Semaphore(config.rollout.concurrency)
        self._origins: dict[str, dict[str, Any]] = {}
        self.live: dict[str, Running] = {}
        self.playing: dict[str, Played] = {}
        self.pausing = 0
        self.last_event = self.last_success = clock()

    def go_on(self, group: Group, cut: Trajectory) -> None:
        """A trajectory that was cut will be played further."""
        group.playing.add(cut.trajectory_id)
        self._origins[cut.trajectory_id] = {"continued_at": len(cut), "continued_turns": cut.num_turns}
        self._counters.continued += 1

    def new_trajectory(self, group: Group, instead: str | None = None) -> Trajectory:
        """instead: the trajectory that was cut by a kill and lost, whose place it takes."""
        name = f"{group.group_id}-{uuid.uuid4().hex[:12]}"
        group.playing.add(name)
        if instead is not None:
            self._origins[name] = {"restarted_from": instead}
            self._counters.restarted += 1
        return Trajectory(name, group.group_id, group.task.task_id, self._sampling, group.task.data)

    async def play(self, group: Group, trajectory: Trajectory) -> str:
        """Play until an attempt finishes. Empty then; else why all of them failed."""
        attempts = 1 + self._config.rollout.max_retries
        for attempt in range(attempts):
            if attempt:
                trajectory = await self._another(group, attempt)
            try:
                await self._play(group.task, trajectory)
            except ReplayDiverged as cause:
                trajectory = await self._begin_anew(group, trajectory, str(cause))
                await self._play(group.task, trajectory)
            state = await self._ledger.finish(trajectory)
            group.playing.discard(trajectory.trajectory_id)
            gaps = self._ledger.lineage.gaps(self._trainer_version(), trajectory.versions[trajectory.loss_mask])
            self._counters.record(trajectory, gaps)
            self.last_event = self._clock()
            if state is not State.FAILED:
                group.finished_lengths.append(trajectory.num_action_tokens)
                self.last_success = self._clock()
                return ""
        return (
            f"{attempts} attempts of one member failed (rollout.max_retries={attempts - 1}); the last one: "
            f"{trajectory.info.get('ending')}: {trajectory.info.get('failure', trajectory.status)}"
        )

    async def _begin_anew(self, group: Group, cut: Trajectory, reason: str) -> Trajectory:
        """Another trajectory in the place of one that could not go on."""
        logger.warning("trajectory %s begins anew: %s", cut.trajectory_id, reason)
        await self._ledger.abandon([cut.trajectory_id], f"cut and not continued: {reason}")
        group.playing.discard(cut.trajectory_id)
        self._counters.continued -= 1
        trajectory = self.new_trajectory(group, instead=cut.trajectory_id)
        await self._ledger.start([trajectory])
        return trajectory

    async def _another(self, group: Group, attempt: int) -> Trajectory:
        """Another attempt of a member that failed, after a pause."""
        self._counters.retried += 1
        self.pausing += 1
        try:
            await asyncio.sleep(min(0.1 * 2**attempt, _LONGEST_RETRY_PAUSE_S))
            trajectory = self.new_trajectory(group)
            await self._ledger.start([trajectory])
        finally:
            self.pausing -= 1
        return trajectory

    async def _play(self, task: Task, trajectory: Trajectory) -> None:
        async with self._slots:
            origin = self._origins.pop(trajectory.trajectory_id, {})
            progress = EpisodeProgress(floor=self._sampling_version(), lost=self._lost, origin=origin)
            running = Running(progress, self._clock())
            started = time.time()
            self.live[trajectory.trajectory_id] = running
            self.playing[trajectory.trajectory_id] = Played(trajectory, running.progress)
            try:
                making = environment_call(self._source, "environment", trajectory)
                environment = environment_calls.make(making, partial(self._source.environment, task))
                await run_episode(
                    self._pool,
                    self._chat,
                    environment,
                    trajectory,
                    self._limits,
                    running.progress,
                    self._count_tokens,
                )
            except EpisodeFailure as failure:  # to be made: of one that was, it has become the trajectory's ending
                fail(trajectory, failure, progress)
            finally:
                del self.live[trajectory.trajectory_id]
                del self.playing[trajectory.trajectory_id]
                self._timeline.record("episode", self._trainer_version(), started, time.time())

    def _lost(self, version: int) -> bool:
        return self._ledger.lineage.lost(version, self._trainer_version())

    def _count_tokens(self, count: int) -> None:
        self._counters.add_tokens(count)
        self.last_event = self._clock()

    def raise_if_hopeless(self) -> None:
        """A run in which groups only fail ends with the reason, instead of going on in silence."""
        silent = self._clock() - self.last_success
        counters = self._counters
        if (
            counters.consecutive_abandoned >= _HOPELESS_GROUPS
            and silent > self._config.rollout.turn_deadline_s
        ):
            raise RolloutFailure(
                f"{counters.consecutive_abandoned} groups in a row were given up and no episode finished for "
                f"{silent:.0f} s (rollout.turn_deadline_s={self._config.rollout.turn_deadline_s:g}). Failures by kind: "
                f"{dict(counters.failed)}; the last one: {counters.last_failure}"
            )
