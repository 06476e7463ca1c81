"""The state machine of a trajectory and the one function that moves along it.

    running ---> finished ---> reserved ---> trained
       |            | ^            |  ^________|   (redo: a checkpoint older than the step was resumed)
       v            | |____________|               (rollback of a step that was not committed)
     failed         +---> stale, filtered

Every move is a conditional UPDATE whose row count is checked; behind it a trigger of the database refuses any other
change of state, whoever makes it. Counts per state are kept in the same transaction, see `counted`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, select, update

from megatron_async.bank.errors import BankError
from megatron_async.bank.tables import state_counts, trajectories


class State(StrEnum):
    RUNNING = "running"  # being sampled
    FINISHED = "finished"  # waits to be trained
    RESERVED = "reserved"  # in the batch of a step that is not committed
    TRAINED = "trained"  # in the batch of a committed step
    STALE = "stale"  # was too old when its batch was built
    FILTERED = "filtered"  # finished, but not wanted: surplus, a group given up, no signal
    FAILED = "failed"  # environment or engine failed, or it was abandoned; never a reward


TRANSITIONS: frozenset[tuple[State, State]] = frozenset(
    {
        (State.RUNNING, State.FINISHED),
        (State.RUNNING, State.FAILED),
        (State.FINISHED, State.RESERVED),
        (State.FINISHED, State.STALE),
        (State.FINISHED, State.FILTERED),
        (State.RESERVED, State.TRAINED),
        (State.RESERVED, State.FINISHED),
        (State.TRAINED, State.RESERVED),
    }
)


_PENDING = "bank_state_changes"


def move(conn: Connection, positions: Sequence[int], old: State, new: State, **values: Any) -> None:
    """Move the trajectories at `positions` from `old` to `new`, all or none, and set other columns with it.

    Raises BankError, naming the first offender, unless every one of them is in `old`.
    """
    if (old, new) not in TRANSITIONS:
        raise BankError(f"no trajectory may go from {old.value} to {new.value}")
    if not positions:
        return
    change = update(trajectories).where(
        trajectories.c.position.in_(positions), trajectories.c.state == old.value
    )
    moved = conn.execute(change.values(state=new.value, **values)).rowcount
    if moved != len(positions):
        raise BankError(_offender(conn, positions, old, new))
    count(conn, {old: -moved, new: moved})


def count(conn: Connection, changes: dict[State, int]) -> None:
    """Remember what to add to the counts per state; `counted` adds it."""
    pending: Counter[State] = conn.info[_PENDING]
    pending.update(changes)


@contextmanager
def counted(conn: Connection) -> Iterator[None]:
    """Around the work of one transaction: at its end the counts per state are brought up to date, each row once.

    All in one order and last, so that two transactions that move trajectories differently never wait for each other,
    and hold the few rows that everybody writes as shortly as can be.
    """
    pending = conn.info[_PENDING] = Counter[State]()
    yield
    for state in sorted(pending):
        if pending[state]:
            change = update(state_counts).where(state_counts.c.state == state.value)
            conn.execute(change.values(n=state_counts.c.n + pending[state]))


def _offender(conn: Connection, positions: Sequence[int], old: State, new: State) -> str:
    """The update has touched the good rows already: the offender is in neither `old` nor, by this call, `new`."""
    query = select(trajectories.c.position, trajectories.c.trajectory_id, trajectories.c.state)
    found = conn.execute(query.where(trajectories.c.position.in_(positions))).all()
    wanted = f"wanted {old.value} -> {new.value}"
    missing = set(positions) - {row.position for row in found}
    if missing:
        return f"no trajectory at position {min(missing)}; {wanted}"
    others = [row for row in found if row.state != new.value] or found
    return f"trajectory {others[0].trajectory_id!r} is {others[0].state}; {wanted}"
