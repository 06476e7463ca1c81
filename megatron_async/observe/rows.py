"""Append-only files of JSON rows (JSONL) that survive a kill at any moment.

Invariants: a row is one `write` of one line, so concurrent appenders do not mix and a reader never sees half a row as
a row; a torn last line (the writer was killed in between) is skipped by readers and cut off by the next appender.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


def finite(value: Any) -> Any:
    """The value in strict JSON, which has no NaN or infinity: they become null and text, so that all can parse it."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()  # a numpy or torch scalar
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


class RowWriter:
    """Appends rows to one file; each is on disk (in the kernel's hands) when `append` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; raises TypeError for values JSON cannot hold."""
        line = json.dumps(finite(row), separators=(",", ":"), allow_nan=False) + "\n"
        data = line.encode()
        written = os.write(self._fd, data)
        if written != len(data):
            raise OSError(
                f"only {written} of {len(data)} bytes of a row went to {self.path}; is the disk full?"
            )

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cut_torn_line(path: Path) -> None:
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        data = file.read()
        end = data.rfind(b"\n") + 1
        if end != len(data):
            file.truncate(end)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a file, oldest first; an absent file has none.

    Raises json.JSONDecodeError for a complete line that is no JSON: that is damage, not a torn write.
    """
    if not path.is_file():
        return []
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in complete.splitlines() if line.strip()]


class RowTail:
    """Reads a growing file of rows bit by bit: each call of `new` gives the rows that were added since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Complete rows added since the last call; none while the file is absent."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:
                self._offset = 0  # the file was started anew
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]
