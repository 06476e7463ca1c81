"""All that differs between SQLite and PostgreSQL; no other file of the bank knows which one it talks to.

SQLite: write-ahead log with a sync on every commit (a commit survives a power cut), and write transactions that take
the write lock when they begin, so that two writers wait for each other instead of failing half-way.
PostgreSQL: READ COMMITTED with row locks; rows another transaction holds are skipped where the order allows it.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Engine, Table, create_engine, event, func, make_url, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from megatron_async.bank.errors import BankOpenError
from megatron_async.bank.states import TRANSITIONS
from megatron_async.passwords import hide_password

LOCK_TIMEOUT_S = 60
"""Longest wait for another writer, in seconds. Transactions last milliseconds; longer means that somebody hangs."""

SQLITE_CACHE_KIB = 32 * 1024
"""Pages a connection keeps in memory, enough for the upper levels of every index of a bank of millions."""

_POSTGRESQL_DISK_FULL = "53100"
_POSTGRESQL_MAKES_WAY = ("40001", "40P01")  # serialization failure, deadlock
_SCHEMA_LOCK = 0x4D41424B  # any number will do that no other program uses as an advisory lock


class Claim(NamedTuple):
    """A name that this process holds. release: give it back. held: whether the database still agrees."""

    release: Callable[[], None]
    held: Callable[[], bool]


def make_engine(url: str, read_only: bool = False) -> Engine:
    """An engine for sqlite:/// or postgresql+psycopg:// URLs; raises BankOpenError for others.

    read_only: the database refuses to write, and all statements of one transaction see the same moment.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise BankOpenError(
            f"bank url {hide_password(url)!r} is not a database URL; write sqlite:///path/bank.sqlite"
        ) from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if read_only:
            file = Path(parsed.database or "").resolve().as_uri().replace("file://", "file:", 1)
            parsed = parsed.set(database=file, query={"mode": "ro", "uri": "true"})
        engine = create_engine(parsed, connect_args={"timeout": LOCK_TIMEOUT_S})
        event.listen(engine, "connect", _prepare_reading if read_only else _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    if backend == "postgresql":
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        # Later connections need these too, when environment code must no longer see them (`credentials`).
        if parsed.password is None and "password" not in parsed.query and os.environ.get("PGPASSWORD"):
            parsed = parsed.set(password=os.environ["PGPASSWORD"])
        if "passfile" not in parsed.query and os.environ.get("PGPASSFILE"):
            parsed = parsed.update_query_dict({"passfile": os.environ["PGPASSFILE"]})
        own = parsed.query.get("options", "")
        options = f"-c lock_timeout={LOCK_TIMEOUT_S}s {own if isinstance(own, str) else ' '.join(own)}"
        if read_only:
            options += (
                " -c default_transaction_read_only=on -c default_transaction_isolation=repeatable\\ read"
            )
        return create_engine(parsed, pool_pre_ping=True, connect_args={"options": options})
    raise BankOpenError(f"bank url {hide_password(url)!r}: {backend} is not supported; use sqlite:/// or postgresql://")


def writing(engine: Engine) -> Engine:
    """The same engine, its transactions announced as writing ones."""
    return engine.execution_options(bank_writes=True)


def connection_lost(error: DBAPIError) -> bool:
    """True when the server went away or cannot be reached, rather than refusing a statement."""
    unreachable = isinstance(error, OperationalError) and error.statement is None
    return error.connection_invalidated or unreachable


def disk_full(error: DBAPIError) -> bool:
    """True when the database had no room to write: it has undone the transaction, also one that was being committed."""
    if isinstance(error.orig, sqlite3.Error):
        return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    return getattr(error.orig, "sqlstate", None) == _POSTGRESQL_DISK_FULL


def makes_way(error: DBAPIError) -> bool:
    """True when the database undid the transaction in favour of another, with which it was deadlocked: do it again."""
    return getattr(error.orig, "sqlstate", None) in _POSTGRESQL_MAKES_WAY


def lock_schema(conn: Connection) -> None:
    """Let one process at a time create the tables. (A writing SQLite transaction is alone already.)"""
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")


def try_claim(engine: Engine, name: str) -> Claim | None:
    """Hold `name` for this process, or None while another one does. It is free again when its holder ends, however."""
    return _try_file(engine, name) if engine.dialect.name == "sqlite" else _try_advisory(engine, name)


def is_free(engine: Engine, name: str) -> bool:
    """Whether nobody holds `name`: it is held for a moment to see."""
    if engine.dialect.name == "sqlite":
        if (claim := _try_file(engine, name)) is not None:
            claim.release()
        return claim is not None
    with engine.begin() as conn:  # the lock ends with the transaction; no connection is made for it
        return bool(conn.execute(select(func.pg_try_advisory_xact_lock(_advisory_key(name)))).scalar_one())


def _try_file(engine: Engine, name: str) -> Claim | None:
    """The kernel's lock on a file beside the database."""
    file = Path(f"{engine.url.database}.{name}.lock").open("a")  # noqa: SIM115 (open for as long as it is held)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return Claim(file.close, lambda: True)


def _try_advisory(engine: Engine, name: str) -> Claim | None:
    """An advisory lock of a connection of its own; the server notices within a minute when the holder's host dies."""
    conn = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    conn.detach()  # never given to somebody else by the pool
    for setting in ("idle = 30", "interval = 10", "count = 3"):
        conn.exec_driver_sql(f"SET tcp_keepalives_{setting}")
    if not conn.execute(select(func.pg_try_advisory_lock(_advisory_key(name)))).scalar_one():
        conn.close()
        return None

    def held() -> bool:
        try:
            conn.exec_driver_sql("SELECT 1")
        except DBAPIError:
            return False
        return True

    return Claim(conn.close, held)


def _advisory_key(name: str) -> ColumnElement[int]:
    return func.hashtextextended(func.current_schema() + f"/{name}", 0)


def insert_missing(conn: Connection, table: Table, values: dict[str, Any]) -> bool:
    """Insert unless a row with the same key is there, even one written at this moment; True when inserted."""
    module = sqlite if conn.dialect.name == "sqlite" else postgresql
    statement = module.insert(table).values(values).on_conflict_do_nothing()
    return conn.execute(statement, execution_options={"preserve_rowcount": True}).rowcount == 1


def upsert(conn: Connection, table: Table, key: str, values: dict[str, Any]) -> None:
    """Insert the row, or overwrite the one with the same `key` column."""
    module = sqlite if conn.dialect.name == "sqlite" else postgresql
    statement = module.insert(table).values(values)
    rest = {name: statement.excluded[name] for name in values if name != key}
    conn.execute(statement.on_conflict_do_update(index_elements=[key], set_=rest))


def create_state_trigger(conn: Connection) -> None:
    """Make the database itself refuse a change of state that the state machine does not have."""
    allowed = " OR ".join(
        f"(OLD.state = '{old.value}' AND NEW.state = '{new.value}')" for old, new in sorted(TRANSITIONS)
    )
    statements = _SQLITE_TRIGGER if conn.dialect.name == "sqlite" else _POSTGRESQL_TRIGGER
    for statement in statements:
        conn.exec_driver_sql(statement.replace("ALLOWED", allowed))


_SQLITE_TRIGGER = (
    """CREATE TRIGGER IF NOT EXISTS trajectory_state BEFORE UPDATE OF state ON trajectories
    WHEN NEW.state <> OLD.state AND NOT (ALLOWED)
    BEGIN SELECT RAISE(ABORT, 'no such transition of a trajectory''s state'); END""",
    """CREATE TRIGGER IF NOT EXISTS trajectory_start BEFORE INSERT ON trajectories WHEN NEW.state <> 'running'
    BEGIN SELECT RAISE(ABORT, 'a trajectory starts as running'); END""",
)
_POSTGRESQL_TRIGGER = (
    """CREATE OR REPLACE FUNCTION check_trajectory_state() RETURNS trigger AS $$ BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.state <> 'running' THEN RAISE EXCEPTION 'a trajectory starts as running'; END IF;
    ELSIF NEW.state <> OLD.state AND NOT (ALLOWED) THEN
        RAISE EXCEPTION USING
            MESSAGE = 'no such transition of a trajectory''s state: ' || OLD.state || ' to ' || NEW.state;
    END IF;
    RETURN NEW; END $$ LANGUAGE plpgsql""",
    """CREATE OR REPLACE TRIGGER trajectory_state BEFORE INSERT OR UPDATE OF state ON trajectories
    FOR EACH ROW EXECUTE FUNCTION check_trajectory_state()""",
)


def _prepare_reading(connection: Any, record: Any) -> None:
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout = {LOCK_TIMEOUT_S * 1000}")


def _prepare_sqlite(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # transactions begin where SQLAlchemy says, see _begin_sqlite
    for pragma in (
        f"busy_timeout = {LOCK_TIMEOUT_S * 1000}",
        "synchronous = FULL",
        "foreign_keys = ON",
        f"cache_size = -{SQLITE_CACHE_KIB}",
    ):
        connection.execute(f"PRAGMA {pragma}")
    _use_write_ahead_log(connection)


def _use_write_ahead_log(connection: Any) -> None:
    """Switch a new database to write-ahead logging; one that has it already is only asked.

    Two connections that switch at the same moment hold a read lock each and want to write: SQLite answers one of them
    "database is locked" at once, whatever the busy timeout, since waiting could not end. It tries again here.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _begin_sqlite(conn: Connection) -> None:
    writes = conn.get_execution_options().get("bank_writes", False)
    conn.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
