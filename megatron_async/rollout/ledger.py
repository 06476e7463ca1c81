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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from megatron_async.bank import Bank, BankError, OpenGroup, State
from megatron_async.bank.requests import FINISHED, PHASE, WRITE_DOWN, WRITTEN_DOWN
from megatron_async.trajectory import Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BankView:
    """What the bank said at one moment.

    version: the current policy version. running: trajectories that some rollout plays. waiting: finished and not yet
    trained, those reserved by the step in progress included. trained, stale: totals. finished: the run is over.
    """

    version: int
    running: int
    waiting: int
    trained: int
    stale: int
    finished: bool


@dataclass(slots=True)
class _Ending:
    """A finished trajectory on its way into the bank. outcome: what the bank said of it, None before that."""

    trajectory: Trajectory
    outcome: State | BankError | None = None


class Ledger:
    """Asynchronous access to a `Bank` for one rollout; `cursor_name` keeps the place in the stream of prompts."""

    def __init__(self, bank: Bank, cursor_name: str = "prompts/train") -> None:
        self._bank = bank
        self._cursor_name = cursor_name
        self._endings: deque[_Ending] = deque()
        self._ahead: set[str] = set()  # recorded as ended with an earlier call, their own is still to come
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bank")

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def look(self) -> BankView:
        return await self._call(self._look)

    def _look(self) -> BankView:
        counts = self._bank.counts()
        return BankView(
            version=self._bank.current_version(),
            running=counts[State.RUNNING],
            waiting=counts[State.FINISHED] + counts[State.RESERVED],
            trained=counts[State.TRAINED],
            stale=counts[State.STALE],
            finished=self._bank.get_state(PHASE) == FINISHED,
        )

    async def recover(self) -> tuple[int, list[OpenGroup], list[Trajectory]]:
        """(prompt cursor, groups that are not done, what an earlier process left running), oldest first."""

        def work() -> tuple[int, list[OpenGroup], list[Trajectory]]:
            cursor = self._bank.load_cursor(self._cursor_name)
            return cursor, self._bank.open_groups(), self._bank.list_running()

        return await self._call(work)

    async def checkpoint(self, trajectories: Sequence[Trajectory]) -> None:
        """Write down the present tokens of running trajectories, in one transaction."""
        await self._call(lambda: self._bank.checkpoint_trajectories(self._still_running(trajectories)))

    def _still_running(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """On the bank's thread: without those that have been recorded as ended since the call was made."""
        return [each for each in trajectories if each.trajectory_id not in self._ahead]

    async def start(self, trajectories: Sequence[Trajectory], cursor: int | None = None) -> None:
        """Record trajectories as running and, with them, that the prompts before `cursor` are issued.

        One transaction: a prompt is issued exactly when its group is recorded, wherever a kill falls.
        """
        place = None if cursor is None else (self._cursor_name, cursor)
        await self._call(lambda: self._bank.start_trajectories(trajectories, place))

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
        """Wait for the calls already made; the bank itself stays open."""
        self._thread.shutdown(wait=True)
