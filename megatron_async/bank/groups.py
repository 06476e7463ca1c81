"""Groups of trajectories of one prompt, and the counts that make polling cheap.

A group is *complete* when the wanted number of members waits, or when it was closed and none runs any more. It is
*done* once its members were reserved, went stale or were given up: members that come later are surplus.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, func, literal, select, update

from megatron_async.bank import dialects, texts
from megatron_async.bank.errors import BankError
from megatron_async.bank.states import State, move
from megatron_async.bank.tables import CLOSED_QUEUE, groups, prompts, trajectories


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that is not done: what a restarted rollout has to complete. Members that wait are kept; min_updates:
    fewest updates behind the version of one of their tokens, None while none waits."""

    group_id: str
    prompt_id: str
    task: dict[str, Any]
    running: int
    waiting: int
    failed: int
    closed: bool
    min_updates: int | None = None


def lock_or_create(conn: Connection, group_id: str, prompt_id: str, task: dict[str, Any]) -> Row[Any]:
    """The group's row, locked; it and its prompt are inserted at the first use."""
    row = _locked(conn, groups.c.group_id == group_id)
    if row is None:
        now = time.time()
        prompt = {"prompt_id": prompt_id, "task": msgspec.json.encode(task).decode(), "created_at": now}
        dialects.insert_missing(conn, prompts, prompt)
        dialects.insert_missing(conn, groups, {"group_id": group_id, "prompt_id": prompt_id})
        row = _locked(conn, groups.c.group_id == group_id)
    assert row is not None
    if row.prompt_id != texts.shortened_id(prompt_id):
        raise BankError(f"group {group_id!r} is of prompt {row.prompt_id!r}, not {prompt_id!r}")
    return row


def lock(conn: Connection, position: int) -> Row[Any]:
    row = _locked(conn, groups.c.position == position)
    assert row is not None
    return row


def lock_all(conn: Connection, group_ids: Collection[str]) -> None:
    """Lock groups before any other row, in one order for everybody: who takes them one by one would meet others."""
    chosen = select(groups.c.position).where(groups.c.group_id.in_(group_ids)).order_by(groups.c.position)
    conn.execute(chosen.with_for_update()).all()


def adjust(
    conn: Connection, row: Row[Any], *, running: int = 0, waiting: int = 0, failed: int = 0, **values: Any
) -> None:
    """Add to a locked group's counts, set other columns, and work out its place in the queue again."""
    fields = dict(row._mapping)
    fields.update(values)
    for name, change in (("running", running), ("waiting", waiting), ("failed", failed)):
        fields[name] += change
    fields["queue"] = _queue(fields)
    changed = {name: value for name, value in fields.items() if value != row._mapping[name]}
    if changed:
        conn.execute(update(groups).where(groups.c.position == row.position).values(changed))


def _queue(fields: dict[str, Any]) -> int:
    if fields["done"]:
        return 0
    if fields["closed"]:
        return CLOSED_QUEUE if fields["waiting"] and not fields["running"] else 0
    return int(fields["waiting"])


def oldest_complete(
    conn: Connection, wanted: int, group_size: int, min_updates: int, overtaking: int | None = None
) -> list[int]:
    """Positions of up to `wanted` complete groups without an older token, locked, in the order they were started in.

    overtaking: so many older groups that are not complete may stay behind; None: any number.
    The condition on the age stands in the statement that locks: a group may have become complete since the stale ones
    were marked, by a member that was sampled long ago. Exactly complete groups come in the order of the index. The few
    that are over-full or closed are sorted here: asked to sort them, SQLite walks through all groups there ever were.
    """
    # coalesce: with the bare column SQLite may take the index of ages and walk through all that wait.
    fresh = func.coalesce(groups.c.min_updates, min_updates) >= min_updates
    exact = select(groups.c.position).where(groups.c.queue == group_size, fresh).order_by(groups.c.position)
    above = select(groups.c.position).where(groups.c.queue > group_size, fresh)
    found: list[int] = []
    for query in (exact.limit(wanted), above):
        found += conn.execute(query.with_for_update(skip_locked=True)).scalars()
    return sorted(found)[: _before_the_window_ends(conn, sorted(found), group_size, overtaking)][:wanted]


def _before_the_window_ends(
    conn: Connection, complete: Sequence[int], group_size: int, overtaking: int | None
) -> int:
    """How many of the complete groups have at most `overtaking` older ones before them that are not."""
    if overtaking is None:
        return len(complete)
    unready = select(groups.c.position).where(groups.c.done.is_(False), groups.c.queue < group_size)
    behind = conn.execute(unready.order_by(groups.c.position).limit(overtaking + 1)).scalars().all()
    return len(complete) if len(behind) <= overtaking else bisect_left(complete, behind[-1])


def waiting(conn: Connection, group_positions: Sequence[int]) -> Sequence[int]:
    """Positions of the members of these groups that wait to be trained."""
    query = select(trajectories.c.position).where(
        trajectories.c.group_position.in_(group_positions), trajectories.c.state == State.FINISHED.value
    )
    return conn.execute(query).scalars().all()


def retire(conn: Connection, positions: Sequence[int]) -> None:
    """Mark locked groups done: none of their members waits any more."""
    done = {"done": True, "waiting": 0, "queue": 0, "min_updates": None}
    conn.execute(update(groups).where(groups.c.position.in_(positions)).values(done))


def revive(conn: Connection, positions: Sequence[int]) -> None:
    """Put groups whose reserved members went back to `finished` into the queue again."""
    for position in sorted(positions):
        row = lock(conn, position)
        waiting = trajectories.c.state == State.FINISHED.value
        query = select(func.count(), func.min(trajectories.c.min_updates))
        n, oldest = conn.execute(query.where(trajectories.c.group_position == position, waiting)).one()
        adjust(conn, row, waiting=n - row.waiting, min_updates=oldest, done=False)


def close(conn: Connection, group_id: str, fewest: int | None, reason: str) -> int:
    """See `Bank.close_group`; fewest: None keeps none."""
    row = _locked(conn, groups.c.group_id == group_id)
    if row is None:
        raise BankError(f"no group {group_id!r} to close")
    if row.done:
        return 0
    if fewest is not None and row.waiting + row.running >= max(fewest, 1):
        adjust(conn, row, closed=True)
        return int(row.waiting)
    move(conn, waiting(conn, [row.position]), State.FINISHED, State.FILTERED, reason=reason)
    adjust(conn, row, closed=True)
    retire(conn, [row.position])
    return 0


def unfinished(conn: Connection) -> list[OpenGroup]:
    """See `Bank.open_groups`."""
    query = select(groups, prompts.c.task).join(prompts, prompts.c.prompt_id == groups.c.prompt_id)
    rows = conn.execute(query.where(groups.c.done.is_(False)).order_by(groups.c.position))
    return [
        OpenGroup(
            group_id=row.group_id,
            prompt_id=row.prompt_id,
            task=msgspec.json.decode(row.task),
            running=row.running,
            waiting=row.waiting,
            failed=row.failed,
            closed=row.closed,
            min_updates=row.min_updates,
        )
        for row in rows
    ]


def names_unfinished(conn: Connection, group_size: int | None) -> list[str]:
    """See `Bank.unfinished_groups`."""
    wanting = select(groups.c.group_id).where(groups.c.done.is_(False))
    if group_size is not None:
        wanting = wanting.where(groups.c.queue < group_size)  # one that is closed and complete stands above every size
    # A literal, which lets the planner see that the index of the running ones is enough.
    is_running = trajectories.c.state == literal(State.RUNNING.value, literal_execute=True)
    playing = select(trajectories.c.group_position).where(is_running)
    found = set(conn.execute(wanting).scalars())
    found.update(conn.execute(select(groups.c.group_id).where(groups.c.position.in_(playing))).scalars())
    return sorted(found)


def _locked(conn: Connection, condition: Any) -> Row[Any] | None:
    return conn.execute(select(groups).where(condition).with_for_update()).one_or_none()
