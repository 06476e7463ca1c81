"""The rollout's side of the bank: every call on one thread of its own, so that the event loop never waits for a disk.

Invariants
- Calls reach the bank one after another in the order in which they were made; only the record of a finished
  trajectory may overtake others, to share a transaction with one before it.
- A call that was made is carried out, also when who made it is cancelled: a trajectory that finished as the rollout was
  stopped, or its group dropped, is recorded as finished before anything that is asked for later.
- A look counts trajectories before it reads the version. If a step is committed in between, the step's trajectories
  are counted although its version is already the new one, which makes admission too strict for a moment, never too
  generous.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from megatron_async.bank import Bank, BankError, Issued, OpenGroup, Place, Places, State, Version
from megatron_async.bank.lineage import Lineage
from megatron_async.bank.requests import FINISHED, PHASE, WRITE_DOWN, WRITTEN_DOWN
from megatron_async.errors import UserError
from megatron_async.rollout.numbers import Numbers
from megatron_async.trajectory import Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

CURSOR = "prompts/train"
"""Cursor of the stream of prompts, which all rollout processes of a bank draw from."""
_CLAIM_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class BankView:
    """What the bank said at one moment.

    version: the current policy version. running: trajectories that some rollout plays. waiting: finished and not yet
    trained, those reserved by the step in progress included; reserved: those. trained, stale, filtered: totals. places:
    what the batches of all these will lack, and how many batches were taken.
    finished: the run is over. oldest: the least of what other rollout processes hold their groups to be from, in
    updates, None where nobody plays. fresh: versions that were not known before. gone: numbers of other rollout
    processes that left work behind and that nobody holds.
    """

    version: int
    running: int
    waiting: int
    reserved: int
    trained: int
    stale: int
    filtered: int
    finished: bool
    places: Places
    oldest: int | None = None
    fresh: tuple[Version, ...] = ()
    gone: tuple[int, ...] = ()

    @property
    def taking_part(self) -> int:
        """Places in batches that are taken by what waits, members that groups were kept without included."""
        return self.waiting + self.places.waiting + self.places.reserved

    @property
    def left(self) -> int:
        """Those of them outside the batches that were taken."""
        return self.waiting - self.reserved + self.places.waiting

    @property
    def settled(self) -> tuple[int, int, int]:
        """What changes when waiting trajectories get their final state."""
        return self.trained, self.stale, self.filtered


class Left(NamedTuple):
    """What a rollout process left, oldest first: groups that are not done, and trajectories as last written down."""

    groups: list[OpenGroup]
    running: list[Trajectory]


@dataclass(slots=True)
class _Ending:
    """A finished trajectory on its way into the bank. outcome: what the bank said of it, None before that."""

    trajectory: Trajectory
    outcome: State | BankError | None = None


class Ledger:
    """Asynchronous access to a `Bank` for one rollout process.

    numbers: its own number and the others of the bank, which draw from one stream of prompts (default: number 0, which
    takes nothing over). What other processes play is seen in the counts and not touched while they are there. batch:
    its groups, and the members of one.
    """

    def __init__(self, bank: Bank, numbers: Numbers | None = None, batch: tuple[int, int] = (1, 1)) -> None:
        self._bank = bank
        self._batch = batch
        self.lineage = Lineage()
        """Of the versions up to the last look."""
        self._numbers = numbers or Numbers(bank)
        self._endings: deque[_Ending] = deque()
        self._ahead: set[str] = set()  # recorded as ended with an earlier call, their own is still to come
        self._unheard: list[Future[Any]] = []  # calls whose callers were cancelled
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bank")

    async def _call(self, work: Callable[[], T]) -> T:
        call = self._thread.submit(work)
        try:
            return await asyncio.shield(asyncio.wrap_future(call))
        except asyncio.CancelledError:
            self._unheard = [each for each in self._unheard if not each.done() or each.exception()] + [call]
            raise

    async def claim(self, patience_s: float) -> None:
        """Be the only rollout process of this number, until `close`.

        Waits so many seconds for another one to end: that one was killed may be noticed a moment later. Raises
        UserError when it does not.
        """
        deadline = time.monotonic() + patience_s
        while not await self._call(self._numbers.claim):
            if time.monotonic() > deadline:
                raise UserError(
                    f"rollout.process {self._numbers.own}: a rollout process of this number is at work in this bank. "
                    "Stop it, or give this one a number of its own (--set rollout.process=1); a number that ran before "
                    "goes on with what it left"
                )
            await asyncio.sleep(_CLAIM_PAUSE_S)

    async def look(self, oldest: int | None = None) -> BankView:
        """What the bank says now; `lineage` then knows the version. oldest: updates behind what this process's groups
        are from at least, for others to know."""
        view = await self._call(lambda: self._look(oldest))
        for version in view.fresh:
            if version.parent is not None:
                self.lineage.add(version.version, version.parent)
        return view

    def _look(self, oldest: int | None) -> BankView:
        others = self._numbers.look(oldest)
        counts, places = self._bank.counts(), self._bank.places(*self._batch)
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
            places=places,
            oldest=others,
            fresh=tuple(self._bank.versions(above=known)) if version > known else (),
            gone=self._numbers.gone,
        )

    async def recover(self) -> tuple[int, Left]:
        """The prompt cursor, and what was left of the groups that this process's number plays."""

        def work() -> tuple[int, Left]:
            mine = self._numbers.mine(self._bank.unfinished_groups())
            return self._bank.load_cursor(CURSOR), self._left(mine)

        return await self._call(work)

    def _left(self, names: Collection[str]) -> Left:
        groups = [each for each in self._bank.open_groups() if each.group_id in names] if names else []
        return Left(groups, self._bank.list_running(names))

    async def take_over(self) -> Left | None:
        """What numbers that are gone for good left, which is this process's now; None where there are none."""
        if not self._numbers.overdue:
            return None
        return await self._call(lambda: self._left(self._numbers.take_over()))

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
            issued = self._bank.issue(trajectories, place, self._numbers.told(str(oldest)))
            if issued.started:
                self._numbers.was_told(str(oldest))
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

    async def leave_nothing(self, trajectory_ids: Sequence[str], reason: str) -> None:
        """Before `close`: mark what was running as failed; nobody will go on with this process's groups."""

        def work() -> None:
            if trajectory_ids:
                self._bank.abandon_running(reason, list(trajectory_ids))
            self._numbers.leave_nothing()

        await self._call(work)

    def close(self) -> None:
        """Carry out the calls already made, and give the process's number back; the bank itself stays open."""
        self._thread.shutdown(wait=True)
        for error in filter(None, (call.exception() for call in self._unheard)):
            logger.error("a call to the bank that nobody waited for failed: %s: %s", type(error).__name__, error)
        self._numbers.release()
