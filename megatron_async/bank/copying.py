"""A bank as it is at one moment, copied into an SQLite file: what a replay trains on, wherever it was recorded."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Engine, Table, insert, select

from megatron_async.bank import dialects
from megatron_async.bank.tables import metadata

_ROWS_AT_ONCE = 256


def copy(source: Engine, file: Path) -> None:
    """source: opened for reading only, so that the whole copy is of one moment. file: a new one."""
    target = dialects.make_engine(f"sqlite:///{file}")
    try:
        with source.connect() as reading, dialects.writing(target).begin() as writing:
            metadata.create_all(writing)
            for table in metadata.sorted_tables:
                _copy_rows(reading, writing, table)
            dialects.create_state_trigger(writing)  # now: history does not start as running
    finally:
        target.dispose()


def _copy_rows(reading: Connection, writing: Connection, table: Table) -> None:
    query = select(table).order_by(*table.primary_key)  # a version comes after the one it was made from
    found = reading.execute(query, execution_options={"yield_per": _ROWS_AT_ONCE})
    for rows in found.mappings().partitions():
        writing.execute(insert(table), [dict(row) for row in rows])
