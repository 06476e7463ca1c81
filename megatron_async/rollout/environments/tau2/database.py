"""Databases of many episodes on one copy of the data.

The airline and retail databases take 0.2 s and 25 MB to copy and 0.1 s to hash; an episode touches a handful of their
records. `layered` gives an episode its own database whose records are shared with a template until a writing tool asks
for one, and `fingerprint` hashes only what differs from the template.

Invariants
- A record of the template is never handed out while the database is `writing`: the first access puts a private copy
  in its place. Sharing is allowed only inside `reading()`, for tools that the benchmark itself marks as reading.
- Two layered databases of one template have equal fingerprints exactly when the benchmark's own hashes are equal (the
  benchmark hashes the sorted JSON of the dump; the fingerprint is the same JSON restricted to records that differ).
- A database that is not made of keyed records (telecom: small lists) is copied whole and hashed by the benchmark.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel


class _Access:
    """Whether the owner of a layered database may be about to change records."""

    __slots__ = ("writing",)

    def __init__(self) -> None:
        self.writing = True


class Records(dict[str, Any]):
    """The records of one table: those of `template`, until they are replaced by private copies."""

    __slots__ = ("access", "template")

    def __init__(self, template: Mapping[str, Any], access: _Access) -> None:
        super().__init__(template)
        self.template = template
        self.access = access

    def _own(self, key: str, record: Any) -> Any:
        if self.access.writing and record is self.template.get(key):
            record = copy.deepcopy(record)
            super().__setitem__(key, record)
        return record

    def _own_all(self) -> None:
        for key, record in list(super().items()):
            self._own(key, record)

    def __getitem__(self, key: str) -> Any:
        return self._own(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        # not dict.get: only __getitem__ makes a private copy
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: str, default: Any = None) -> Any:
        super().setdefault(key, default)
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self._own(key, super().__getitem__(key))
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        self._own_all()
        return super().popitem()

    def values(self) -> Any:
        self._own_all()
        return super().values()

    def items(self) -> Any:
        self._own_all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        self._own_all()
        return dict(self)

    def changed(self) -> set[str]:
        """Keys whose record is not the template's: replaced, added, or removed."""
        now = {key for key, record in super().items() if record is not self.template.get(key)}
        return now | (self.template.keys() - self.keys())


def layered(template: BaseModel) -> BaseModel:
    """A database of its own that begins equal to `template`, which must not change any more."""
    tables = {name: getattr(template, name) for name in type(template).model_fields}
    if not all(_keyed_records(table) for table in tables.values()):
        return copy.deepcopy(template)
    access = _Access()
    records: dict[str, Any] = {name: Records(table, access) for name, table in tables.items()}
    return type(template).model_construct(None, **records)


@contextmanager
def reading(*databases: BaseModel | None) -> Iterator[None]:
    """Inside, the databases' owner promises not to change records, so they stay shared."""
    found = [access for database in databases if database is not None for access in _accesses(database)]
    for access in found:
        access.writing = False
    try:
        yield
    finally:
        for access in found:
            access.writing = True


def fingerprint(database: BaseModel, full_hash: str | None = None) -> str:
    """A digest of the state: equal digests of databases of one template mean equal states.

    full_hash: the benchmark's own hash, if the caller has it; else it is computed for databases copied whole.
    """
    tables = _tables(database)
    if not tables:
        return f"whole:{full_hash if full_hash is not None else database.get_hash()}"  # type: ignore[attr-defined]
    difference: dict[str, dict[str, str | None]] = {}
    for name, records in tables.items():
        keys = records.changed()
        if not keys:
            continue
        now = _dumped(database, name, {key: dict.__getitem__(records, key) for key in keys if key in records})
        then = _dumped(
            database, name, {key: records.template[key] for key in keys if key in records.template}
        )
        changes = {key: now.get(key) for key in keys if now.get(key) != then.get(key)}
        if changes:
            difference[name] = changes
    text = json.dumps(difference, sort_keys=True)
    return f"difference:{hashlib.sha256(text.encode()).hexdigest()}"


def _dumped(database: BaseModel, table: str, records: dict[str, Any]) -> dict[str, str]:
    """Records as the benchmark's hash sees them: dumped by the database's own schema, then as sorted JSON."""
    part = type(database).model_construct(None, **{table: records})
    dumped = part.model_dump(include={table})[table]
    return {key: json.dumps(value, sort_keys=True, default=str) for key, value in dumped.items()}


def _keyed_records(table: Any) -> bool:
    return isinstance(table, dict) and all(
        isinstance(key, str) and isinstance(record, BaseModel) for key, record in table.items()
    )


def _tables(database: BaseModel) -> dict[str, Records]:
    values = {name: getattr(database, name) for name in type(database).model_fields}
    return values if all(isinstance(value, Records) for value in values.values()) else {}


def _accesses(database: BaseModel) -> list[_Access]:
    return [records.access for records in _tables(database).values()][:1]
