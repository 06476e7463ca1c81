"""Small records beside the trajectories: the graph of versions, shared state, cursors.

A version id is never used twice: after a resume numbering goes on above the highest id ever recorded, with the
resumed version as parent, so that versions form a graph and a token's version always means the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from megatron_async.bank import dialects
from megatron_async.bank.errors import BankError
from megatron_async.bank.tables import cursors, key_values, versions
from megatron_async.bank.texts import IDS_AT_ONCE, chunks

_CURRENT = "bank/current_version"
_DISCARDED = "bank/discarded_through"


@dataclass(frozen=True, slots=True)
class Version:
    """parent: the version it was trained from, None for the starting checkpoint. updates: that lie between the starting
    checkpoint and it; ids run ahead of them once a run was resumed. created_at: seconds since 1970."""

    version: int
    parent: int | None
    step: int | None
    created_at: float
    updates: int


def record_version(conn: Connection, version: int, parent: int | None, step: int | None) -> None:
    """See `Bank.record_version`."""
    if version == 0 and parent is None:
        return  # the starting checkpoint is there from the beginning
    known = conn.execute(select(versions).where(versions.c.version == version)).one_or_none()
    newest = newest_version(conn)
    if known is not None:
        raise BankError(
            f"version {version} was recorded before (parent {known.parent}, step {known.step}); ids are never used "
            f"again: the next one is {newest + 1}"
        )
    if version <= newest:
        raise BankError(f"version {version} is below the newest recorded version {newest}; use {newest + 1}")
    behind = None if parent is None else updates_of(conn, {parent}).get(parent)
    if behind is None:
        raise BankError(f"version {version}: its parent {parent} is not recorded")
    row = {
        "version": version, "parent": parent, "updates": behind + 1, "step": step, "created_at": time.time()
    }  # fmt: skip
    conn.execute(versions.insert().values(row))
    write_key(conn, _CURRENT, str(version))


def set_current(conn: Connection, version: int) -> None:
    """See `Bank.set_current_version`."""
    if conn.execute(select(versions).where(versions.c.version == version)).one_or_none() is None:
        raise BankError(f"version {version} is not recorded; it cannot become the current one")
    write_key(conn, _CURRENT, str(version))


def current_version(conn: Connection) -> int:
    return int(read_key(conn, _CURRENT) or 0)


def newest_version(conn: Connection) -> int:
    return int(conn.execute(select(func.max(versions.c.version))).scalar_one())


def versions_above(conn: Connection, known: int) -> list[Version]:
    """See `Bank.versions`."""
    rows = conn.execute(select(versions).where(versions.c.version > known).order_by(versions.c.version))
    return [Version(row.version, row.parent, row.step, row.created_at, row.updates) for row in rows]


def updates_of(conn: Connection, ids: Collection[int]) -> dict[int, int]:
    """Updates behind each of these versions; an id that was never recorded is left out."""
    query = select(versions.c.version, versions.c.updates).where(versions.c.version.in_(ids))
    return {row.version: row.updates for row in conn.execute(query)} if ids else {}


def discarded_through(conn: Connection) -> int:
    """See `Bank.discarded_through`."""
    found = read_key(conn, _DISCARDED)
    return -1 if found is None else int(found)


def write_discarded(conn: Connection, step: int) -> None:
    """Remember that trained batches up to `step` have no tokens any more; never goes back."""
    write_key(conn, _DISCARDED, str(max(step, discarded_through(conn))))


def write_key(conn: Connection, key: str, value: str) -> None:
    dialects.upsert(conn, key_values, "key", {"key": key, "value": value})


def read_key(conn: Connection, key: str) -> str | None:
    return conn.execute(select(key_values.c.value).where(key_values.c.key == key)).scalar_one_or_none()


def read_keys(conn: Connection, keys: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for names in chunks(keys, IDS_AT_ONCE):
        rows = conn.execute(select(key_values).where(key_values.c.key.in_(names)))
        found.update({row.key: row.value for row in rows})
    return found


def write_cursor(conn: Connection, name: str, value: int) -> None:
    dialects.upsert(conn, cursors, "name", {"name": name, "value": value})


def lock_cursor(conn: Connection, name: str) -> int:
    """The value, which nobody else moves until the transaction ends."""
    dialects.insert_missing(conn, cursors, {"name": name, "value": 0})
    found = select(cursors.c.value).where(cursors.c.name == name).with_for_update()
    return int(conn.execute(found).scalar_one())


def read_cursor(conn: Connection, name: str) -> int | None:
    return conn.execute(select(cursors.c.value).where(cursors.c.name == name)).scalar_one_or_none()
