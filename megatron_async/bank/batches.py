"""Batches on their way out: taken under a step, committed with it, rolled back, trained again.

A batch is taken in one transaction: what is too old is marked stale, groups without variance make room where that is
asked for, the oldest complete groups are reserved under the step. A step is `reserved` until it is committed. When a
checkpoint older than committed steps is resumed, those steps become `redo`: taking them again gives the recorded
batches in the recorded order.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Column, Connection, Select, delete, exists, func, select, update

from megatron_async.bank import dialects, filtering, ledger
from megatron_async.bank import groups as group_rows
from megatron_async.bank.errors import BankError, TokensDiscarded
from megatron_async.bank.states import State, move
from megatron_async.bank.tables import CLOSED_QUEUE, groups, payloads, steps, trajectories

_GROUPS_AT_ONCE = 256  # keeps the number of parameters of one statement below every database's limit


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. state: reserved, committed or redo. metrics: as given to `commit_step`."""

    step: int
    state: str
    version_before: int | None
    version_after: int | None
    trajectories: int
    metrics: dict[str, Any]
    reserved_at: float
    committed_at: float | None


@dataclass(frozen=True, slots=True)
class Places:
    """Places in batches that stay empty, since groups were closed with fewer members than they have.

    waiting: of groups that wait. reserved: of batches that are not committed. batches: that were taken so far, those of
    steps that were given back left out.
    """

    waiting: int
    reserved: int
    batches: int


def take(
    conn: Connection,
    step: int,
    wanted: int,
    group_size: int,
    min_updates: int,
    max_filtered: int,
    overtaking: int | None,
) -> list[bytes] | None:
    """See `Bank.take_batch`; payloads in the batch's order, or None while there are too few complete groups."""
    row = conn.execute(select(steps.c.state).where(steps.c.step == step)).one_or_none()
    if row is not None and row.state == "redo":
        conn.execute(
            update(steps).where(steps.c.step == step).values(state="reserved", reserved_at=time.time())
        )
        return _payloads(conn, step)
    if row is not None:
        raise BankError(
            f"step {step} is {row.state}; wanted a new batch. A reserved step is committed with commit_step or given "
            "back with rollback_uncommitted; a committed one is only trained again when an older checkpoint is resumed"
        )
    _mark_stale(conn, group_size, min_updates)
    chosen = filtering.choose(conn, step, wanted, group_size, min_updates, max_filtered, overtaking)
    if len(chosen) < wanted:
        return None
    members = _reserve_members(conn, step, chosen, group_size)
    group_rows.retire(conn, chosen)
    reserved = {"step": step, "state": "reserved", "trajectories": members, "reserved_at": time.time()}
    if not dialects.insert_missing(conn, steps, reserved):
        raise BankError(
            f"step {step}: another trainer took a batch for it at this moment; run one trainer per bank"
        )
    return _payloads(conn, step)


def ready(conn: Connection, group_size: int) -> int:
    """Complete groups that wait."""
    query = select(func.count()).select_from(groups).where(groups.c.queue >= group_size)
    return int(conn.execute(query).scalar_one())


def places(conn: Connection, wanted: int, group_size: int) -> Places:
    """See `Bank.places`."""
    closed = select(func.count(), func.coalesce(func.sum(groups.c.waiting), 0)).where(groups.c.queue == CLOSED_QUEUE)
    n_groups, members = conn.execute(closed).one()
    under_way = select(func.count(), func.coalesce(func.sum(steps.c.trajectories), 0))
    n_steps, held = conn.execute(under_way.where(steps.c.state.in_(("reserved", "redo")))).one()
    newest = conn.execute(select(func.max(steps.c.step))).scalar_one_or_none()
    return Places(
        waiting=max(0, n_groups * group_size - int(members)),
        reserved=max(0, n_steps * wanted * group_size - int(held)),
        batches=0 if newest is None else newest + 1,
    )


def waiting(conn: Connection, known: Container[str], min_updates: int, max_tokens: int) -> list[bytes]:
    """See `Bank.list_waiting`."""
    return _ahead(conn, [_waiting(*_SIZES).where(trajectories.c.min_updates >= min_updates)], known, max_tokens)


def waiting_ids(conn: Connection) -> set[str]:
    """See `Bank.waiting_ids`."""
    return set(conn.execute(_waiting(trajectories.c.trajectory_id)).scalars())


def unscored(
    conn: Connection, known: Container[str], versions: tuple[int, int], max_tokens: int
) -> list[bytes]:
    """See `Bank.list_unscored`; versions: the oldest and the newest allowed."""
    oldest, newest = versions
    reserved = select(*_SIZES).join(steps, steps.c.step == trajectories.c.step)
    queries = [reserved.where(steps.c.state == "reserved"), _waiting(*_SIZES)]
    inside = (trajectories.c.min_version >= oldest, trajectories.c.max_version <= newest)
    return _ahead(conn, [query.where(*inside) for query in queries], known, max_tokens)


def sampled_by(conn: Connection, version: int) -> list[bytes]:
    """See `Bank.list_sampled_by`; also trajectories that only have older and newer tokens, of which there are few."""
    around = (trajectories.c.min_version <= version, trajectories.c.max_version >= version)
    running = select(trajectories.c.position).where(trajectories.c.state == State.RUNNING.value, *around)
    positions = [
        *conn.execute(_waiting(trajectories.c.position).where(*around)).scalars(),
        *conn.execute(running).scalars(),
    ]
    found = select(payloads.c.data).where(payloads.c.position.in_(positions)).order_by(payloads.c.position)
    return list(conn.execute(found).scalars()) if positions else []


_SIZES = (trajectories.c.position, trajectories.c.trajectory_id, trajectories.c.tokens)


def _waiting(*columns: Column[Any]) -> Select[Any]:
    """Finished trajectories in the queue."""
    found = select(*columns).join(groups, groups.c.position == trajectories.c.group_position)
    return found.where(groups.c.queue > 0, trajectories.c.state == State.FINISHED.value)


def _ahead(
    conn: Connection, queries: Sequence[Select[Any]], known: Container[str], max_tokens: int
) -> list[bytes]:
    """Payloads of what the queries find, one after the other, without those known and within the budget."""
    chosen: list[int] = []
    room = max_tokens
    for query in queries:
        for row in conn.execute(query.order_by(trajectories.c.position)):
            if row.trajectory_id not in known and (row.tokens <= room or not chosen):
                chosen.append(row.position)
                room -= row.tokens
    found = select(payloads.c.data).where(payloads.c.position.in_(chosen)).order_by(payloads.c.position)
    return list(conn.execute(found).scalars()) if chosen else []


def commit(conn: Connection, step: int, before: int, after: int, metrics: dict[str, Any]) -> None:
    """See `Bank.commit_step`."""
    change = update(steps).where(steps.c.step == step, steps.c.state == "reserved")
    done = {
        "state": "committed",
        "version_before": before,
        "version_after": after,
        "metrics": msgspec.json.encode(metrics, enc_hook=float).decode(),  # enc_hook: NumPy scalars
        "committed_at": time.time(),
    }
    if conn.execute(change.values(done)).rowcount != 1:
        state = conn.execute(select(steps.c.state).where(steps.c.step == step)).scalar_one_or_none()
        raise BankError(f"step {step} is {state or 'not there'}; wanted reserved -> committed")
    move(conn, _members(conn, step), State.RESERVED, State.TRAINED)


def rollback(conn: Connection, checkpoint_step: int | None) -> int:
    """See `Bank.rollback_uncommitted`."""
    if checkpoint_step is not None and checkpoint_step < (gone := ledger.discarded_through(conn)):
        raise TokensDiscarded(
            f"cannot go back to the state after step {checkpoint_step}: tokens of steps up to {gone} were deleted when "
            "newer checkpoints held what they taught (bank.keep). Resume from one of those, or start anew with --fresh"
        )
    returned = 0
    query = select(steps.c.step, steps.c.version_before).where(steps.c.state == "reserved")
    for row in conn.execute(query.order_by(steps.c.step)).all():
        if row.version_before is None:
            returned += _give_back(conn, row.step)
        else:  # it was committed once, so its batch is on record: it stays together and is trained again
            _mark_redo(conn, row.step)
    if checkpoint_step is not None:
        lost = select(steps.c.step).where(steps.c.state == "committed", steps.c.step > checkpoint_step)
        for step in conn.execute(lost.order_by(steps.c.step)).scalars().all():
            move(conn, _members(conn, step), State.TRAINED, State.RESERVED)
            _mark_redo(conn, step)
    return returned


def discard_payloads(conn: Connection, through_step: int) -> int:
    """See `Bank.discard_payloads`."""
    ledger.write_discarded(conn, through_step)
    over = (State.STALE.value, State.FILTERED.value, State.FAILED.value)
    trained = (trajectories.c.state == State.TRAINED.value) & (trajectories.c.step <= through_step)
    # Correlated, so that the cost goes with the payloads that are left, not with all trajectories there were.
    gone = exists().where(
        trajectories.c.position == payloads.c.position, trajectories.c.state.in_(over) | trained
    )
    return int(conn.execute(delete(payloads).where(gone)).rowcount)


def recorded(conn: Connection) -> list[Step]:
    rows = conn.execute(select(steps).order_by(steps.c.step)).all()
    return [
        Step(
            step=row.step,
            state=row.state,
            version_before=row.version_before,
            version_after=row.version_after,
            trajectories=row.trajectories,
            metrics=msgspec.json.decode(row.metrics) if row.metrics else {},
            reserved_at=row.reserved_at,
            committed_at=row.committed_at,
        )
        for row in rows
    ]


def _mark_stale(conn: Connection, group_size: int, min_updates: int) -> None:
    """Complete groups holding a token of a version with fewer updates leave the queue, all members with them."""
    query = select(groups.c.position).where(groups.c.min_updates < min_updates, groups.c.queue >= group_size)
    query = query.limit(_GROUPS_AT_ONCE).with_for_update(skip_locked=True)
    reason = f"stale: a token's version had fewer than {min_updates} updates when a batch was built"
    while old := conn.execute(query).scalars().all():
        move(conn, group_rows.waiting(conn, old), State.FINISHED, State.STALE, reason=reason)
        group_rows.retire(conn, old)


def _reserve_members(conn: Connection, step: int, chosen: Sequence[int], group_size: int) -> int:
    """Reserve the oldest `group_size` waiting members of each group; later ones are surplus."""
    query = select(trajectories.c.position, trajectories.c.group_position)
    query = query.where(
        trajectories.c.group_position.in_(chosen), trajectories.c.state == State.FINISHED.value
    )
    members: dict[int, list[int]] = {}
    for row in conn.execute(query.order_by(trajectories.c.group_position, trajectories.c.position)):
        members.setdefault(row.group_position, []).append(row.position)
    taken = [position for group in members.values() for position in group[:group_size]]
    surplus = [position for group in members.values() for position in group[group_size:]]
    move(conn, taken, State.FINISHED, State.RESERVED, step=step)
    reason = f"surplus: its group had more than {group_size} members"
    move(conn, surplus, State.FINISHED, State.FILTERED, reason=reason)
    return len(taken)


def _mark_redo(conn: Connection, step: int) -> None:
    conn.execute(update(steps).where(steps.c.step == step).values(state="redo", committed_at=None))


def _give_back(conn: Connection, step: int) -> int:
    positions = _members(conn, step)
    query = select(trajectories.c.group_position).where(trajectories.c.step == step).distinct()
    touched = conn.execute(query).scalars().all()
    move(conn, positions, State.RESERVED, State.FINISHED, step=None)
    group_rows.revive(conn, touched)
    conn.execute(delete(steps).where(steps.c.step == step))
    return len(positions)


def _members(conn: Connection, step: int) -> Sequence[int]:
    query = select(trajectories.c.position).where(trajectories.c.step == step)
    return conn.execute(query.order_by(trajectories.c.position)).scalars().all()


def _payloads(conn: Connection, step: int) -> list[bytes]:
    """In the order of the batch: groups by age, members by age."""
    query = select(payloads.c.data).join(trajectories, trajectories.c.position == payloads.c.position)
    query = query.where(trajectories.c.step == step)
    return list(
        conn.execute(query.order_by(trajectories.c.group_position, trajectories.c.position)).scalars()
    )
