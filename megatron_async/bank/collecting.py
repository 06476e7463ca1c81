"""Trajectories on their way in: started, written down while they run, finished, abandoned."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, insert, select, update

from megatron_async.bank import groups, ledger, tables, texts
from megatron_async.bank.errors import BankError
from megatron_async.bank.states import State, count, move
from megatron_async.bank.tables import payloads, state_counts, trajectories
from megatron_async.bank.texts import IDS_AT_ONCE, chunks
from megatron_async.trajectory import Status, Trajectory


def start(conn: Connection, trajectory: Trajectory) -> None:
    """See `Bank.start_trajectory`."""
    if trajectory.finished:
        raise BankError(
            f"trajectory {trajectory.trajectory_id!r} is {trajectory.status.value} before it started"
        )
    for kind, name in (("trajectory", trajectory.trajectory_id), ("group", trajectory.group_id)):
        if texts.shortened_id(name) != name:
            raise BankError(
                f"the id of {kind} {name[:40]!r}... has {len(name)} characters or one that no database stores (NUL); "
                f"ids have at most {texts.LONGEST_ID} characters"
            )
    group = groups.lock_or_create(conn, trajectory.group_id, trajectory.prompt_id, trajectory.task)
    if group.done or group.closed:
        raise BankError(
            f"trajectory {trajectory.trajectory_id!r}: its group {trajectory.group_id!r} takes no more members"
        )
    taken = select(trajectories.c.state).where(trajectories.c.trajectory_id == trajectory.trajectory_id)
    state = conn.execute(taken).scalar_one_or_none()
    if state is not None:
        raise BankError(f"trajectory {trajectory.trajectory_id!r} is {state}; wanted a new one")
    row = {
        "trajectory_id": trajectory.trajectory_id,
        "group_position": group.position,
        "state": State.RUNNING.value,
        "started_at": time.time(),
        **_summary(trajectory),
    }
    inserted = conn.execute(insert(trajectories).values(row)).inserted_primary_key
    assert inserted is not None
    conn.execute(insert(payloads).values(position=inserted.position, data=trajectory.to_bytes()))
    groups.adjust(conn, group, running=1)
    count(conn, {State.RUNNING: 1})


def checkpoint(conn: Connection, batch: Sequence[Trajectory]) -> None:
    """See `Bank.checkpoint_trajectories`. A few statements, however many trajectories: it is called all the time."""
    query = select(trajectories.c.position, trajectories.c.trajectory_id, trajectories.c.state)
    query = query.where(trajectories.c.trajectory_id.in_([trajectory.trajectory_id for trajectory in batch]))
    # One order of locks for everybody.
    found = conn.execute(query.order_by(trajectories.c.position).with_for_update())
    rows = {row.trajectory_id: row for row in found}
    changes, contents = [], []
    for trajectory in batch:
        row = rows.get(trajectory.trajectory_id)
        if row is None or row.state != State.RUNNING.value or trajectory.finished:
            raise BankError(
                f"trajectory {trajectory.trajectory_id!r} is {'unknown' if row is None else row.state} in the bank and "
                f"{trajectory.status.value} in memory; wanted running -> running"
            )
        changes.append({"at": row.position, **_summary(trajectory)})
        contents.append({"at": row.position, "data": trajectory.to_bytes()})
    if changes:
        conn.execute(update(trajectories).where(trajectories.c.position == bindparam("at")), changes)
        conn.execute(update(payloads).where(payloads.c.position == bindparam("at")), contents)


def updates_behind(conn: Connection, batch: Sequence[Trajectory]) -> dict[int, int]:
    """Updates behind every recorded version that these trajectories hold tokens of."""
    return ledger.updates_of(conn, {span.version for trajectory in batch for span in trajectory.spans})


def finish(conn: Connection, trajectory: Trajectory, updates: Mapping[int, int]) -> State:
    """See `Bank.finish_trajectory`; updates: from `updates_behind`."""
    if not trajectory.finished:
        raise BankError(f"trajectory {trajectory.trajectory_id!r} is still running; call its finish() first")
    held = {span.version for span in trajectory.spans}
    if unknown := sorted(held - updates.keys()):
        raise BankError(
            f"trajectory {trajectory.trajectory_id!r} has tokens of version {unknown[-1]}, but the newest recorded "
            f"version is {ledger.newest_version(conn)}: record_version must come before the engines get its weights"
        )
    oldest = min((updates[version] for version in held), default=None)
    row = _row(conn, trajectory, "running -> finished")
    group = groups.lock(conn, row.group_position)
    reason = _why_untrainable(trajectory)
    new = State.FAILED if reason else State.FINISHED
    summary = {**_summary(trajectory), "finished_at": time.time(), "reason": reason, "min_updates": oldest}
    move(conn, [row.position], State.RUNNING, new, **summary)
    _store(conn, row.position, trajectory)
    if new is State.FAILED:
        groups.adjust(conn, group, running=-1, failed=1)
    elif group.done:
        new = State.FILTERED
        surplus = "surplus: its group was done before it finished"
        move(conn, [row.position], State.FINISHED, new, reason=surplus)
        groups.adjust(conn, group, running=-1)
    else:
        known = [updates for updates in (group.min_updates, oldest) if updates is not None]
        groups.adjust(conn, group, running=-1, waiting=1, min_updates=min(known))
    _retire_if_empty(conn, group)
    return new


def running(conn: Connection, group_ids: Collection[str] | None) -> list[bytes]:
    """See `Bank.list_running`: payloads."""
    query = select(trajectories.c.position, payloads.c.data).where(trajectories.c.state == State.RUNNING.value)
    query = query.join(payloads, trajectories.c.position == payloads.c.position).order_by(trajectories.c.position)
    if group_ids is None:
        return [data for _, data in conn.execute(query)]
    query = query.join(tables.groups, tables.groups.c.position == trajectories.c.group_position)
    found: list[tuple[int, bytes]] = []
    for names in chunks(group_ids, IDS_AT_ONCE):
        found += [(at, data) for at, data in conn.execute(query.where(tables.groups.c.group_id.in_(names)))]
    return [data for _, data in sorted(found)]


def in_play(conn: Connection) -> int:
    """Trajectories that run, or wait for a step to be committed."""
    counted = (State.RUNNING.value, State.FINISHED.value, State.RESERVED.value)
    query = select(func.sum(state_counts.c.n)).where(state_counts.c.state.in_(counted))
    return int(conn.execute(query).scalar_one())


def signs_of_life(conn: Connection) -> tuple[int, ...]:
    """See `Bank.signs_of_life`."""
    counts = select(state_counts.c.n).order_by(state_counts.c.state)
    held = select(func.coalesce(func.sum(trajectories.c.tokens), 0))
    held = held.where(trajectories.c.state == State.RUNNING.value)
    return *map(int, conn.execute(counts).scalars()), int(conn.execute(held).scalar_one())


def states_of(conn: Connection, trajectory_ids: Sequence[str]) -> dict[str, State]:
    """See `Bank.states_of`."""
    query = select(trajectories.c.trajectory_id, trajectories.c.state)
    found: dict[str, State] = {}
    for names in chunks(trajectory_ids, IDS_AT_ONCE):
        named = trajectories.c.trajectory_id.in_(names)
        found.update({row.trajectory_id: State(row.state) for row in conn.execute(query.where(named))})
    return found


def abandon(conn: Connection, reason: str, trajectory_ids: Sequence[str] | None) -> int:
    """See `Bank.abandon_running`."""
    found = trajectories.c.state == State.RUNNING.value
    if trajectory_ids is not None:
        found &= trajectories.c.trajectory_id.in_(trajectory_ids)
    affected = set(conn.execute(select(trajectories.c.group_position).where(found)).scalars())
    held = {position: groups.lock(conn, position) for position in sorted(affected)}
    # Asked again now that the groups are locked: some may have finished in between.
    members: dict[int, list[int]] = {position: [] for position in held}
    here = trajectories.c.group_position.in_(list(held))
    for row in conn.execute(
        select(trajectories.c.position, trajectories.c.group_position).where(found, here)
    ):
        members[row.group_position].append(row.position)
    for group_position, positions in members.items():
        group = held[group_position]
        end = {"reason": reason, "status": Status.ABORTED.value, "finished_at": time.time()}
        move(conn, positions, State.RUNNING, State.FAILED, **end)
        groups.adjust(conn, group, running=-len(positions), failed=len(positions))
        _retire_if_empty(conn, group)
    return sum(map(len, members.values()))


def _retire_if_empty(conn: Connection, before: Row[Any]) -> None:
    """A closed group has nothing to give any more once none of its members waits or runs."""
    if before.closed and not before.done:
        group = groups.lock(conn, before.position)
        if not group.running and not group.waiting:
            groups.retire(conn, [group.position])


def _why_untrainable(trajectory: Trajectory) -> str | None:
    if not trajectory.status.trainable:
        return str(trajectory.info.get("reason", trajectory.status.value))
    if trajectory.reward is None or not trajectory.num_action_tokens:
        return f"{trajectory.status.value} with {trajectory.num_action_tokens} action tokens, no reward to train on"
    return None


def _summary(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "status": trajectory.status.value,
        "reward": trajectory.reward,
        "tokens": len(trajectory),
        "action_tokens": trajectory.num_action_tokens,
        "min_version": trajectory.min_version,
        "max_version": trajectory.max_version,
    }


def _store(conn: Connection, position: int, trajectory: Trajectory) -> None:
    conn.execute(update(payloads).where(payloads.c.position == position).values(data=trajectory.to_bytes()))


def _row(conn: Connection, trajectory: Trajectory, wanted: str) -> Row[int, int, str]:
    query = select(trajectories.c.position, trajectories.c.group_position, trajectories.c.state)
    query = query.where(trajectories.c.trajectory_id == trajectory.trajectory_id)
    row = conn.execute(query).one_or_none()
    if row is None:
        raise BankError(f"trajectory {trajectory.trajectory_id!r} was never started; wanted {wanted}")
    return row
