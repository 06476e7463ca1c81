"""The rollout's side of the bank: every call on one thread of its own, so that the event loop never waits for a disk.

Invariants
- Calls reach the bank one after another in the order in which they were made; only the record of a finished
  trajectory may overtake others, to share a transaction with one before it.
- A look counts trajectories before it reads the version. If a step is committed in between, the step's trajectories
  are counted although its version is already the new one, which makes admission too strict for a moment, never too
  generous.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy.exc import DBAPIError

from megatron_async.bank import Bank, BankError, Issued, OpenGroup, Place, State, Version
from megatron_async.bank.requests import FINISHED, OLDEST, PHASE, WRITE_DOWN, WRITTEN_DOWN
from megatron_async.config.schema import MOST_ROLLOUTS
from megatron_async.errors import UserError
from megatron_async.rollout.prompts import process_of
from megatron_async.training.lineage import Lineage
from megatron_async.trajectory import Trajectory

T = TypeVar("T")

CURSOR = "prompts/train"
"""Cursor of the stream of prompts, which all rollout processes of a bank draw from."""
_CLAIM_PAUSE_S = 0.1
_OLDEST_KEYS = [OLDEST.format(process) for process in range(MOST_ROLLOUTS)]


@dataclass(frozen=True, slots=True)
class BankView:
    """What the bank said at one moment.

    version: the current policy version. running: trajectories that some rollout plays. waiting: finished and not yet
    trained, those reserved by the step in progress included; reserved: those. trained, stale, filtered: totals.
    finished: the run is over. oldest: the least of what other rollout processes hold their groups to be from, in
    updates, None where nobody plays. fresh: versions that were not known before.
    """

    version: int
    running: int
    waiting: int
    reserved: int
    trained: int
    stale: int
    filtered: int
    finished: bool
    oldest: int | None = None
    fresh: tuple[Version, ...] = ()

    @property
    def taken(self) -> int:
        """Trajectories in batches, trained or in progress; a resume that trains recorded batches again keeps them."""
        return self.trained + self.reserved

    @property
    def settled(self) -> tuple[int, int, int]:
        """What changes when waiting trajectories get their final state."""
        return self.trained, self.stale, self.filtered


@dataclass(slots=True)
class _Ending:
    """A finished trajectory on its way into the bank. outcome: what the bank said of it, None before that."""

    trajectory: Trajectory
    outcome: State | BankError | None = None


class Ledger:
    """Asynchronous access to a `Bank` for one rollout process.

    process: its number among those of the bank, which draw from one stream of prompts. Groups carry it in their names;
    what other processes play is seen in the counts and never touched.
    """

    def __init__(self, bank: Bank, process: int = 0) -> None:
        self._bank = bank
        self.lineage = Lineage()
        """Of the versions up to the last look."""
        self._process = process
        self._oldest = ""
        self._endings: deque[_Ending] = deque()
        self._ahead: set[str] = set()  # recorded as ended with an earlier call, their own is still to come
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bank")

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def claim(self, patience_s: float) -> None:
        """Be the only rollout process of this number, until `close`.

        Waits so many seconds for another one to end: that one was killed may be noticed a moment later. Raises
        UserError when it does not.
        """
        deadline = time.monotonic() + patience_s
        while not await self._call(lambda: self._bank.claim(self._claim_name)):
            if time.monotonic() > deadline:
                raise UserError(
                    f"rollout.process {self._process}: a rollout process of this number is at work in this bank. Stop "
                    "it, or give this one a number of its own (--set rollout.process=1); a number that ran before "
                    "goes on with what it left"
                )
            await asyncio.sleep(_CLAIM_PAUSE_S)

    @property
    def _claim_name(self) -> str:
        return f"rollout-{self._process}"

    async def look(self, oldest: int | None = None) -> BankView:
        """What the bank says now; `lineage` then knows the version. oldest: updates behind what this process's groups
        are from at least, for others to know."""
        view = await self._call(lambda: self._look("" if oldest is None else str(oldest)))
        for version in view.fresh:
            if version.parent is not None:
                self.lineage.add(version.version, version.parent)
        return view

    def _look(self, oldest: str) -> BankView:
        if oldest != self._oldest:
            self._bank.set_state(OLDEST.format(self._process), oldest)
            self._oldest = oldest
        self._check_claim()
        told = self._bank.get_states(_OLDEST_KEYS)
        told.pop(OLDEST.format(self._process), None)
        counts = self._bank.counts()
        version, known = self._bank.current_version(), self.lineage.newest
        return BankView(
            version=version,
            running=counts[State.RUNNING],
            waiting=counts[State.FINISHED] + counts[State.RESERVED],
            reserved=counts[State.RESERVED],
            trained=counts[State.TRAINED],
            stale=counts[State.STALE],
            filtered=counts[State.FILTERED],
            finished=self._bank.get_state(PHASE) == FINISHED,
            oldest=min((int(value) for value in told.values() if value), default=None),
            fresh=tuple(self._bank.versions(above=known)) if version > known else (),
        )

    def _check_claim(self) -> None:
        try:
            held = self._bank.claim(self._claim_name)
        except DBAPIError:
            return  # the server is away; the next look asks again
        if not held:
            raise UserError(
                f"rollout.process {self._process}: while the database was away, another rollout process of this number "
                "took over; this one ends"
            )

    async def recover(self) -> tuple[int, list[OpenGroup], list[Trajectory]]:
        """(prompt cursor, groups that are not done, what was left running), oldest first, of this process's number."""

        def work() -> tuple[int, list[OpenGroup], list[Trajectory]]:
            groups = [each for each in self._bank.open_groups() if process_of(each.group_id) == self._process]
            partial = [each for each in self._bank.list_running() if process_of(each.group_id) == self._process]
            return self._bank.load_cursor(CURSOR), groups, partial

        return await self._call(work)

    async def checkpoint(self, trajectories: Sequence[Trajectory]) -> None:
        """Write down the present tokens of running trajectories, in one transaction."""
        await self._call(lambda: self._bank.checkpoint_trajectories(self._still_running(trajectories)))

    def _still_running(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """On the bank's thread: without those that have been recorded as ended since the call was made."""
        return [each for each in trajectories if each.trajectory_id not in self._ahead]

    async def start(self, trajectories: Sequence[Trajectory]) -> None:
        """Record trajectories as running."""
        await self._call(lambda: self._bank.start_trajectories(trajectories))

    async def issue(self, trajectories: Sequence[Trajectory], place: Place, oldest: int) -> Issued:
        """Record the groups of the next prompts as running; see `Bank.issue`. oldest: as for `look`, these included."""

        def work() -> Issued:
            issued = self._bank.issue(trajectories, place, {OLDEST.format(self._process): str(oldest)})
            if issued.started:
                self._oldest = str(oldest)
            return issued

        return await self._call(work)

    async def states_of(self, trajectory_ids: Sequence[str]) -> dict[str, State]:
        """What became of these trajectories."""
        return await self._call(lambda: self._bank.states_of(trajectory_ids))

    async def finish(self, trajectory: Trajectory) -> State:
        """Record a finished trajectory; returns the state it got (finished, failed, or filtered as surplus).

        Those that finish while the disk syncs for another are recorded together: a sync costs more than a row.
        """
        ending = _Ending(trajectory)
        self._endings.append(ending)
        return await self._call(lambda: self._record(ending))

    def _record(self, ending: _Ending) -> State:
        if ending.outcome is None:
            batch = list(self._endings)
            try:
                states = self._bank.finish_trajectories([each.trajectory for each in batch])
            except BankError as error:
                self._record_apart(batch, error)
            else:
                for each, state in zip(batch, states, strict=True):
                    each.outcome = state
            for each in batch:
                self._endings.popleft()
                self._ahead.add(each.trajectory.trajectory_id)
        self._ahead.discard(ending.trajectory.trajectory_id)
        assert ending.outcome is not None
        if isinstance(ending.outcome, BankError):
            raise ending.outcome
        return ending.outcome

    def _record_apart(self, batch: Sequence[_Ending], error: BankError) -> None:
        """One trajectory that the bank refuses must not keep the others out."""
        if len(batch) == 1:
            batch[0].outcome = error
            return
        for each in batch:
            try:
                each.outcome = self._bank.finish_trajectory(each.trajectory)
            except BankError as refused:
                each.outcome = refused

    async def give_up(self, group: str, trajectory_ids: Sequence[str], reason: str) -> None:
        """Give a group up: its running members fail, its finished ones leave the queue."""

        def work() -> None:
            self._bank.abandon_running(reason, list(trajectory_ids))
            self._bank.close_group(group, keep=False, reason=reason)

        await self._call(work)

    async def keep_part(self, group: str, fewest: int, reason: str) -> bool:
        """Have a group trained with the members that finished, if there are at least `fewest`."""
        return await self._call(lambda: self._bank.close_group(group, keep=True, reason=reason, fewest=fewest) > 0)

    async def asked_to_write_down(self) -> str | None:
        """The trainer's question for partial trajectories, None when there is none that was not answered."""

        def work() -> str | None:
            asked = self._bank.get_state(WRITE_DOWN)
            return None if asked == self._bank.get_state(WRITTEN_DOWN) else asked

        return await self._call(work)

    async def write_down(self, trajectories: Sequence[Trajectory], asked: str) -> None:
        """Write running trajectories down, and then that the question was answered."""

        def work() -> None:
            self._bank.checkpoint_trajectories(self._still_running(trajectories))
            self._bank.set_state(WRITTEN_DOWN, asked)

        await self._call(work)

    async def abandon(self, trajectory_ids: Sequence[str], reason: str) -> None:
        """Mark trajectories that were running as failed."""
        await self._call(lambda: self._bank.abandon_running(reason, list(trajectory_ids)))

    def close(self) -> None:
        """Wait for the calls already made, and give the process's number back; the bank itself stays open."""
        self._thread.shutdown(wait=True)
        self._bank.release(self._claim_name)
