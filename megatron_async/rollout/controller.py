"""What the rollout plays: groups are admitted, started, recovered and given up; `members` plays their episodes.

Invariants
- A group is started only when `Admission` has room for all its members; running and waiting trajectories, those of the
  step in progress included, are counted. Versions are compared by updates along their lineage.
- At most `rollout.concurrency` episodes run; members of an admitted group wait for their turn.
- Every group that was started completes, or is kept without members that failed too often (`rollout.partial_groups`),
  or is given up and counted; its room is free again in any case. Nothing that happens to one group stops another.
- A failed attempt is repeated under a budget, as a new trajectory; it is never a reward.
- Several processes may roll out into one bank, each under a number of its own: they draw from one stream of prompts and
  share the room that the bound leaves; each recovers what its number started. What a number left that is not started
  again is taken over by another process, as if its own number had been started again.
- The prompt cursor and every group are in the bank before the first token is sampled: a restarted rollout completes
  the groups that were open and goes on with unused prompts. Episodes that were under way go on after what was written
  down of them, where their environment can be replayed and their tokens are not too old; others begin anew. Which of
  the two happened is counted and stands in the trajectory's info.
- An exception anywhere ends `run`; nothing is swallowed. After a silence, the log says what everything waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from megatron_async.bank import Bank, OpenGroup, Place
from megatron_async.config.methods import ADVANTAGES
from megatron_async.config.schema import RunConfig
from megatron_async.observe import RunFiles, StatusWriter, Timeline
from megatron_async.rollout.admission import Admission, InPlay
from megatron_async.rollout.agent_loop import Chat
from megatron_async.rollout.counters import LoopLag, RolloutCounters, describe_waiting
from megatron_async.rollout.cut_episodes import CutEpisodes
from megatron_async.rollout.engines import EngineVersions
from megatron_async.rollout.environments.base import Task, TaskSource
from megatron_async.rollout.group import Group
from megatron_async.rollout.ledger import CURSOR, BankView, Ledger, Left
from megatron_async.rollout.loop_watchdog import blocked_groups
from megatron_async.rollout.members import Members
from megatron_async.rollout.numbers import Numbers
from megatron_async.rollout.prompts import PromptStream, group_id
from megatron_async.rollout.writing_down import PartialWriter, Streaming
from megatron_async.trajectory import Trajectory
from sglang_bridge import EnginePool

logger = logging.getLogger(__name__)

_STATUS_S = 0.5
_SILENCE_S = 60.0
_LEAST_PAUSE_S = 0.01
_GROUPS_AT_ONCE = 8
_CLAIM_PATIENCE_S = 10.0


class _Stopped(Exception):
    """Ends the task group when the run is over or a stop was asked for."""


class _MemberFailed(Exception):
    """One member of a group used up its attempts."""


class RolloutController:
    """Plays groups of `batch.group_size` episodes per prompt until the bank says that the run is finished.

    pool: engines that sample; also asked for the version they sample with. clock: monotonic seconds. status, timeline:
    where to report; None reports nowhere.

    Example::

        controller = RolloutController(config, bank, pool, task_source, chat)
        await controller.run()
    """

    def __init__(
        self,
        config: RunConfig,
        bank: Bank,
        pool: EnginePool,
        task_source: TaskSource,
        chat: Chat,
        clock: Callable[[], float] = time.monotonic,
        status: StatusWriter | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.config = config
        self.counters = RolloutCounters()
        self.lag = LoopLag()
        self._source = task_source
        self._clock = clock
        self._status = status
        self._timeline = timeline or Timeline(None, "rollout")
        numbers = Numbers(bank, config.rollout.process, config.batch.group_size, config.rollout.takeover_s, clock)
        self._ledger = Ledger(bank, numbers, (config.batch.groups, config.batch.group_size))
        self._engines = EngineVersions(pool, self._ledger.lineage.updates)
        self._prompts = PromptStream(task_source, config.seed)
        self._admission = _admission(config)
        self._before: tuple[int, InPlay] | None = None  # batches taken until the last look, and what was in play
        self._cursor = 0
        self._most = 0  # trajectories that may run and wait in the bank, by the last look
        self._settled = (0, 0, 0)
        self._version = 0
        self._groups: dict[str, Group] = {}
        self._members = Members(
            config, pool, task_source, chat, self._ledger, self.counters, self._timeline, clock,
            trainer_version=lambda: self._version, sampling_version=self._sampling_version,
        )  # fmt: skip
        self._streaming = Streaming(self._ledger, self._members.playing, config.rollout.flush_s)
        # Members of admitted groups whose end the last look at the bank has not seen, and those of them whose end
        # is in the bank by now: a member is counted as running until a look has counted it as finished.
        self._unfinished = 0
        self._unseen = 0
        self._news = asyncio.Event()
        self._waiting_for = "the bank"
        self._stop_reason = ""
        self._finished = False

    def stop(self, reason: str) -> None:
        """End `run` soon. Running episodes are written down for the next rollout to go on with, or, where
        `rollout.flush_s` is 0, given up; finished ones are kept. May be called by a signal handler."""
        logger.info("rollout stops: %s", reason)
        self._stop_reason = reason
        self._news.set()

    async def run(self) -> RolloutCounters:
        """Roll out until the bank's phase is finished or `stop` was called.

        Raises RolloutFailure when groups keep failing and nothing finishes, and whatever else goes wrong in any part.
        """
        try:
            await self._ledger.claim(_CLAIM_PATIENCE_S)
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self.lag.measure(), name="loop lag")
                parts.create_task(self._watch(), name="watch")
                if self.config.rollout.flush_s > 0:
                    parts.create_task(self._streaming.run(), name="streaming")
                if self.config.old_logits.source == "interrupt":
                    writer = PartialWriter(self._ledger, self._members.playing, self.config.rollout.poll_s)
                    parts.create_task(writer.run(), name="partial trajectories")
                parts.create_task(self._admit(parts), name="admission")
        except BaseExceptionGroup as errors:
            _, defects = errors.split(_Stopped)
            if defects is not None:
                raise _first_leaf(defects) from defects
        finally:
            await self._leave()
        return self.counters

    async def _leave(self) -> None:
        """Nothing that this process started, and nobody will go on with, stays marked as running.

        What was written down, the next rollout goes on with, however this one ends.
        """
        left = [member for group in self._groups.values() for member in group.playing]
        self._groups.clear()
        try:
            if not left or self._finished or self.config.rollout.flush_s == 0:
                await self._ledger.leave_nothing(left, self._stop_reason or "the rollout ended")
            self._report("finished")
        finally:
            self._ledger.close()

    # ------------------------------------------------------------------ admission

    async def _admit(self, parts: asyncio.TaskGroup) -> None:
        await self._recover(parts)
        while True:
            view = await self._look()
            self._members.raise_if_hopeless()
            if (left := await self._ledger.take_over()) is not None:
                await self._go_on(parts, left)
                continue  # what it started is counted before anything new starts
            room = await self._room(view)
            for begin in range(0, room, _GROUPS_AT_ONCE):
                if not await self._open_groups(parts, min(_GROUPS_AT_ONCE, room - begin)):
                    break
            await self._until_news()

    async def _recover(self, parts: asyncio.TaskGroup) -> None:
        """Go on with the groups that an earlier rollout left open, once the engines have said their version."""
        self._cursor, left = await self._ledger.recover()
        while await self._engines.refresh((await self._look()).version) is None:
            self._waiting_for = f"the engines: {self._engines.problem}"
            await self._until_news()
        await self._go_on(parts, left)

    async def _go_on(self, parts: asyncio.TaskGroup, left: Left) -> None:
        line = self._ledger.lineage
        least = line.updates(self._version) - self.config.rollout.max_staleness
        cut = CutEpisodes(left.running, self._source, line.updates, least)
        blocked = blocked_groups(self.config.run_path)
        for group in left.groups:
            missing = self.config.batch.group_size - group.waiting
            if missing <= 0 or group.closed:
                continue
            if reason := self._why_not_again(group, least, blocked[group.group_id]):
                logger.warning("group %s is given up: %s", group.group_id, reason)
                await self._ledger.give_up(group.group_id, cut.claim(group.group_id, 0)[1], reason)
            else:
                await self._resume_group(parts, group, missing, cut)
        await self._ledger.abandon(cut.unclaimed(), "the rollout that played it ended")

    def _why_not_again(self, left: OpenGroup, least: int, blocked: int) -> str:
        """Why a group that was left open is given up; empty where it goes on. blocked: how often it ended a process."""
        rollout = self.config.rollout
        if left.min_updates is not None and left.min_updates < least:
            return f"stale: a member that waits is more than {rollout.max_staleness} updates old"
        if blocked > rollout.max_retries:
            return (
                f"its environment, of task {left.prompt_id}, blocked the event loop {blocked} times until the rollout "
                f"was ended (rollout.max_retries={rollout.max_retries}); see {RunFiles(self.config.run_path).blocked}"
            )
        return ""

    async def _look(self) -> BankView:
        """What the bank says now; ends everything when the run is over or a stop was asked for."""
        settled, pausing = self._unseen, self._members.pausing
        view = await self._ledger.look(self._oldest())
        self._most = view.running + view.waiting
        await self._settle(view)
        view = replace(view, running=view.running + pausing)
        self._unfinished -= settled
        self._unseen -= settled
        if self._stop_reason and not view.finished and self.config.rollout.flush_s > 0:
            await self._streaming.flush()
        self._finished = view.finished
        if view.finished or self._stop_reason:
            raise _Stopped
        if view.version != self._version:
            self._version, self._members.last_event = view.version, self._clock()
        return view

    async def _settle(self, view: BankView) -> None:
        """Count the lengths of what was set aside since the last look, and forget those of what was trained."""
        if view.settled != self._settled:
            self._settled = view.settled
            self.counters.settle(await self._ledger.states_of(self.counters.waiting()))

    async def _room(self, view: BankView) -> int:
        """Whole groups that may start now, by the mode of admission and the bound on concurrency."""
        concurrency = self.config.rollout.concurrency
        await self._engines.refresh(view.version)
        now = self._in_play(view)
        self._drop_surplus(view)
        self._before = view.places.batches, now
        free = self._admission.room(now)
        self._most += free * self.config.batch.group_size
        slots = math.ceil((concurrency - self._unfinished + self._unseen) / self.config.batch.group_size)
        if free == 0:
            self._waiting_for = self._why_no_room(view, now)
        else:
            self._waiting_for = "" if slots > 0 else f"a free place (rollout.concurrency={concurrency})"
        return max(0, min(free, slots))

    def _oldest(self) -> int | None:
        """What admission counts from for the groups that this process plays, in updates."""
        return min((group.oldest for group in self._groups.values()), default=None)

    def _in_play(self, view: BankView) -> InPlay:
        line = self._ledger.lineage
        trainer, sampling = line.updates(view.version), self._sampling_updates()
        for group in self._groups.values():  # when versions go back, its tokens to come are older than those it has
            group.oldest = min(group.oldest, sampling)
        oldest = min((updates for updates in (self._oldest(), view.oldest) if updates is not None), default=None)
        return InPlay(trainer, sampling, view.taking_part, max(self._unfinished, view.running), oldest)

    def _drop_surplus(self, view: BankView) -> None:
        """With over-sampling: once a batch was taken, the slowest groups of what was started for it are not wanted."""
        if self._before is None:
            return
        taken, before = self._before
        batches = view.places.batches - taken
        playing = [group for group in self._groups.values() if group.task_to_cancel and not group.surplus]
        left = sum(group.unfinished for group in playing)
        count = self._admission.surplus(before, batches, view.left, left)
        for group in sorted(playing, key=lambda group: group.group_id)[:count]:
            assert group.task_to_cancel is not None
            group.surplus = "over-sampling: among the slowest when a batch was full"
            live = [self._members.playing[name].trajectory for name in group.playing if name in self._members.playing]
            group.cut_lengths = [trajectory.num_action_tokens for trajectory in live]
            group.task_to_cancel.cancel()

    def _sampling_version(self) -> int:
        """The version that tokens sampled from now on have at least."""
        assert self._engines.version is not None
        return min(self._engines.version, self._version)

    def _sampling_updates(self) -> int:
        """Updates behind the oldest version that an engine samples with."""
        assert self._engines.version is not None
        line = self._ledger.lineage
        return min(line.updates(self._engines.version), line.updates(self._version))

    def _why_no_room(self, view: BankView, now: InPlay) -> str:
        held = ""
        if now.oldest_running is not None and now.oldest_running < now.sampling:
            held = f", the oldest of them {now.sampling - now.oldest_running} updates behind the engines"
        rollout = self.config.rollout
        gone = "".join(
            f"; rollout process {number} is gone, and what it left holds room: it is taken over unless it starts "
            f"again (rollout.takeover_s={rollout.takeover_s:g})"
            for number in view.gone
        )
        return (
            f"the trainer: {view.waiting} trajectories wait and {now.running} run at version {view.version}{held} "
            f"(rollout.admission={rollout.admission}, rollout.max_staleness={rollout.max_staleness}){gone}"
        )

    async def _until_news(self) -> None:
        """Until a member finished, a stop was asked for, or it is time to look at the bank again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.rollout.poll_s):
                await self._news.wait()
        self._news.clear()
        await asyncio.sleep(_LEAST_PAUSE_S)

    # ------------------------------------------------------------------ groups

    async def _open_groups(self, parts: asyncio.TaskGroup, count: int) -> bool:
        """Start the groups of the next `count` prompts, recorded in one transaction.

        False, with nothing started, when another rollout process has issued prompts, or used up the room, meanwhile.
        """
        size, opened = self.config.batch.group_size, []
        for cursor in range(self._cursor, self._cursor + count):
            name = group_id(cursor, self.config.rollout.process)
            group = self._new_group(name, self._prompts.task(cursor), self._sampling_updates(), size)
            opened.append((group, [self._members.new_trajectory(group) for _ in range(size)]))
        place = Place(CURSOR, self._cursor, self._cursor + count, self._most)
        oldest = self._oldest()
        assert oldest is not None, "there are groups"
        issued = await self._ledger.issue([m for _, members in opened for m in members], place, oldest)
        self._cursor = issued.cursor
        if not issued.started:
            for group, _ in opened:
                del self._groups[group.group_id]
                self._unfinished -= size
            return False
        for group, members in opened:
            self._begin(parts, group, members)
            await asyncio.sleep(0)  # the first requests of all of them at once would hold the event loop up
        return True

    def _begin(self, parts: asyncio.TaskGroup, group: Group, members: list[Trajectory]) -> None:
        group.task_to_cancel = parts.create_task(self._play_group(group, members), name=group.group_id)

    async def _resume_group(
        self, parts: asyncio.TaskGroup, left: OpenGroup, missing: int, cut: CutEpisodes
    ) -> None:
        """Play what is missing of a group: members that were cut go on where they can, those that finished are kept."""
        going_on, lost = cut.claim(left.group_id, missing)
        held = [cut.oldest(member) for member in going_on] + [left.min_updates]
        oldest = min([self._sampling_updates(), *(updates for updates in held if updates is not None)])
        group = self._new_group(left.group_id, Task(left.prompt_id, left.task), oldest, missing)
        replaced = [*lost, *([None] * missing)][: missing - len(going_on)]
        anew = [self._members.new_trajectory(group, instead=name) for name in replaced]
        for member in going_on:
            self._members.go_on(group, member)
        logger.info(
            "group %s goes on: %d of its members wait, %d go on where they were, %d begin anew",
            left.group_id, left.waiting, len(going_on), len(anew),
        )  # fmt: skip
        await self._ledger.start(anew)
        self._begin(parts, group, [*going_on, *anew])

    def _new_group(self, name: str, task: Task, oldest: int, size: int) -> Group:
        group = Group(name, task, self._sampling_version(), oldest, size, time.time())
        self._groups[name] = group
        self._unfinished += size
        return group

    async def _play_group(self, group: Group, members: list[Trajectory]) -> None:
        try:
            await self._play_members(group, members)
        except asyncio.CancelledError:
            if not group.surplus:
                raise
            await self._drop(group)
        del self._groups[group.group_id]
        self._news.set()

    async def _play_members(self, group: Group, members: list[Trajectory]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for trajectory in members:
                    tasks.create_task(self._play_member(group, trajectory), name=trajectory.trajectory_id)
        except* _MemberFailed as failures:
            await self._give_up(group, str(_first_leaf(failures)))
        else:
            if not group.failures or await self._keep_part(group):
                self.counters.groups_finished += 1
                self._timeline.record("group", group.version, group.started, time.time())

    async def _drop(self, group: Group) -> None:
        """After its task was cancelled as surplus."""
        logger.info("group %s is dropped: %s", group.group_id, group.surplus)
        await self._ledger.give_up(group.group_id, sorted(group.playing), group.surplus)
        self.counters.record_dropped(group.finished_lengths, group.cut_lengths)
        self.counters.forget(group.group_id)
        self._unseen += group.unfinished

    async def _keep_part(self, group: Group) -> bool:
        """Have a group trained without the members that were given up; False when too few are left, and it is too."""
        group.task_to_cancel = None
        estimator = ADVANTAGES[self.config.advantage.name]
        fewest = min(2, self.config.batch.group_size) if estimator.needs_group else 1
        reason = group.failures[0]
        if not await self._ledger.keep_part(group.group_id, fewest, reason):
            await self._give_up(group, f"fewer than {fewest} of its members finished: {reason}")
            return False
        logger.warning("group %s is kept without %d members: %s", group.group_id, len(group.failures), reason)
        self.counters.groups_partial += 1
        self._unseen += len(group.failures)
        return True

    async def _give_up(self, group: Group, reason: str) -> None:
        logger.warning("group %s is given up: %s", group.group_id, reason)
        group.task_to_cancel = None
        await self._ledger.give_up(group.group_id, sorted(group.playing), reason)
        self.counters.record_abandoned(group.finished_lengths)
        self.counters.forget(group.group_id)
        self._unseen += group.unfinished

    async def _play_member(self, group: Group, trajectory: Trajectory) -> None:
        """A member that used up its attempts is noted where partial groups are kept; else it ends the group."""
        reason = await self._members.play(group, trajectory)
        if not reason:
            self._unseen += 1
            self._news.set()
        elif self.config.rollout.partial_groups == "drop":
            raise _MemberFailed(reason)
        else:
            group.failures.append(reason)

    # ------------------------------------------------------------------ watching

    async def _watch(self) -> None:
        """Report regularly; after a silence, say in the log what everything waits for, then ever more rarely."""
        patience = _SILENCE_S
        while True:
            self._report("running")
            silent = self._clock() - self._members.last_event
            if silent < _SILENCE_S:
                patience = _SILENCE_S
            elif silent >= patience:
                patience *= 2
                line = describe_waiting(self._members.live.values(), self._clock(), self._waiting_for)
                logger.warning("nothing happened for %.0f s: %s", silent, line)
            await asyncio.sleep(_STATUS_S)

    def _report(self, phase: str) -> None:
        if self._status is None:
            return
        numbers = {
            **self.counters.as_dict(self._clock()),
            "running": len(self._members.live),
            "queued": sum(len(group.playing) for group in self._groups.values()) - len(self._members.live),
            "groups_open": len(self._groups),
            "version": self._version,
            "engine_version": -1 if self._engines.version is None else self._engines.version,
            "loop_lag_p99_ms": self.lag.p99_ms(),
            "written_down_tokens": self._streaming.tokens,
        }
        self._status.set(phase, self._waiting_for if phase == "running" else "", numbers)


def _admission(config: RunConfig) -> Admission:
    rollout, batch = config.rollout, config.batch
    return Admission(
        bound=rollout.max_staleness,
        groups=batch.groups,
        group_size=batch.group_size,
        publish_every=config.publish.every,
        mode=rollout.admission,
        over_sampling=rollout.over_sampling,
    )


def _first_leaf(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real exception inside nested groups."""
    first = errors.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
