"""Names that one process holds at a time, such as being the trainer of a bank.

A database's lock alone does not tell its holder that somebody else held it for a while: a PostgreSQL server forgets it
with the connection, and the holder takes it again. So whoever claims a name leaves a mark of its own in the bank.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from megatron_async.bank import dialects

_MARK = "bank/holder/{}"
_RETAKE_S, _RETAKE_PAUSE_S = 2.0, 0.02
"""How long a name is tried again whose connection was cut: `is_free` holds it for a moment."""


class Claims:
    """The names that this process holds. read, write: of the bank's key-value table."""

    def __init__(
        self, engine: Engine, read: Callable[[str], str | None], write: Callable[[str, str], None]
    ) -> None:
        self._engine, self._read, self._write = engine, read, write
        self._held: dict[str, dialects.Claim] = {}
        self._marks: dict[str, str] = {}

    def claim(self, name: str) -> bool:
        """See `Bank.claim`."""
        if self._holds(name):
            return True
        if not self._take(name):
            return False
        self._marks[name] = uuid.uuid4().hex
        self._write(_MARK.format(name), self._marks[name])
        return True

    def keeps(self, name: str) -> bool:
        """See `Bank.keeps`."""
        deadline = time.monotonic() + _RETAKE_S
        while True:
            try:
                held = self._holds(name) or self._take(name)
            except DBAPIError:
                return True
            if self._read(_MARK.format(name)) != self._marks.get(name):
                self.release(name)
                return False
            if held or time.monotonic() > deadline:
                return held
            time.sleep(_RETAKE_PAUSE_S)

    def is_free(self, name: str) -> bool:
        """See `Bank.is_free`."""
        return dialects.is_free(self._engine, name)

    def release(self, name: str) -> None:
        """See `Bank.release`."""
        if (held := self._held.pop(name, None)) is not None:
            held.release()

    def release_all(self) -> None:
        for name in list(self._held):
            self.release(name)

    def _holds(self, name: str) -> bool:
        return name in self._held and self._held[name].held()

    def _take(self, name: str) -> bool:
        self.release(name)
        taken = dialects.try_claim(self._engine, name)
        if taken is not None:
            self._held[name] = taken
        return taken is not None
