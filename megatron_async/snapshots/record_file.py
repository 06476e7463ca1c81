"""One record (or keyframe) as a file.

Layout::

    8 bytes    magic
    payloads   each at a multiple of eight, compressed or not
    table      one row per stored segment (`ROW`)
    footer     rows (u64), table offset (u64), xxh3-128 of table and both numbers (16 bytes), magic

Invariants
- A file appears under its name only when it is complete and on the disk (write aside, fsync, rename, fsync of the
  directory); what a crash leaves has the suffix `.partial`, and is removed at the next opening.
- Every payload has its own checksum, looked at before a bit of it reaches a weight.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
import xxhash

from megatron_async.snapshots.bits import Task
from megatron_async.snapshots.codec import EMPTY, Mode, Segment, check_counts, columns_of, decompress
from megatron_async.snapshots.errors import DamagedRecordError, DiskFullError

MAGIC = b"MADELTA1"
PARTIAL = ".partial"
FOOTER_BYTES = 8 + 8 + 16 + len(MAGIC)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ROW = np.dtype(
    [
        ("task", "<i8"), ("offset", "<i8"), ("stored", "<i8"), ("checksum", "<u8"), ("narrow", "<i8"), ("wide", "<i8"),
        ("mode", "u1"), ("width", "u1"), ("packed", "u1"), ("reserved", "u1", 5),
    ]
)  # fmt: skip


def sync_directory(directory: Path) -> None:
    """Make renames and removals in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming_full_disks(path: Path, written: int) -> Iterator[None]:
    """Turn "no space", "quota exceeded" and "file too large" into DiskFullError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        stat = os.statvfs(path.parent)
        raise DiskFullError(
            f"writing {path.name} in {path.parent} failed after {written:,} bytes ({error.strerror}); "
            f"{stat.f_bavail * stat.f_frsize:,} bytes are free there. Free some, or release versions no token needs"
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Replace a small file atomically and durably.

    Raises:
        DiskFullError: no room; the old file is untouched unless only the last sync failed.
    """
    aside = path.with_name(path.name + PARTIAL)
    try:
        with naming_full_disks(path, len(content)):
            with aside.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(aside, path)
            sync_directory(path.parent)
    finally:
        aside.unlink(missing_ok=True)


class RecordWriter:
    """Writes payloads one after another; the file takes its name on `finish`, and vanishes on an error."""

    def __init__(self, path: Path, budget: int | None) -> None:
        self.path = path
        self._aside = path.with_name(path.name + PARTIAL)
        self._budget = budget
        self._rows: list[tuple[int, ...]] = []
        self._stream = self._aside.open("wb", buffering=0)
        self._position = 0
        self._write(MAGIC)

    def add(self, task: int, segment: Segment, content: bytes | np.ndarray, packed: bool) -> None:
        """Append a stored payload.

        Raises:
            DiskFullError: the file would exceed its budget, or the disk is full.
        """
        view = memoryview(content if isinstance(content, bytes) else content.data).cast("B")
        checksum = xxhash.xxh3_64_intdigest(view)
        row = (task, self._position, len(view), checksum, segment.narrow, segment.wide)
        self._rows.append((*row, int(segment.mode), segment.width, int(packed)))
        self._write(view)
        self._write(bytes(-len(view) % 8))

    def _write(self, content: bytes | memoryview) -> None:
        total = self._position + len(content) + (len(self._rows) * ROW.itemsize + FOOTER_BYTES)
        if self._budget is not None and total > self._budget:
            raise DiskFullError(
                f"{self.path.name} in {self.path.parent} needs more than {total:,} bytes, and "
                f"{self._budget:,} are left "
                "of the disk budget. Raise disk_bytes, or release versions that no token needs"
            )
        rest = memoryview(content)
        with naming_full_disks(self.path, self._position):
            while rest:
                rest = rest[self._stream.write(rest) :]
        self._position += len(content)

    def finish(self) -> RecordFile:
        """Write the table, make the file durable and give it its name."""
        table = np.zeros(len(self._rows), ROW)
        for place, row in enumerate(self._rows):
            table[place] = (*row, [0] * 5)
        numbers = np.array([len(table), self._position], "<u8").tobytes()
        content = table.tobytes() + numbers
        self._rows = []
        self._write(content + xxhash.xxh3_128_digest(content) + MAGIC)
        with naming_full_disks(self.path, self._position):
            os.fsync(self._stream.fileno())
            self._stream.close()
            os.replace(self._aside, self.path)
            sync_directory(self.path.parent)
        return RecordFile(self.path)

    def discard(self) -> None:
        """Remove what was written."""
        self._stream.close()
        self._aside.unlink(missing_ok=True)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._stream.closed:
            self.discard()


class RecordFile:
    """Reads a finished file. The table is read at opening, payloads when asked for.

    Raises (from the constructor and every method):
        DamagedRecordError: the file is missing, truncated or altered; names the file and the place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        table = self._read_table()
        self.nbytes = path.stat().st_size
        self._rows = {int(row["task"]): row for row in table}

    def rename(self, path: Path) -> None:
        """Give the file another name in its directory, durably."""
        with naming_full_disks(path, self.nbytes):
            os.replace(self.path, path)
            sync_directory(path.parent)
        self.path = path

    def _damaged(self, what: str) -> DamagedRecordError:
        return DamagedRecordError(
            f"{self.path}: {what}. Restore the file from a copy, or remove its version with forget(); versions "
            "beyond it are reachable through keyframes only"
        )

    def _read_table(self) -> np.ndarray:
        if not self.path.exists():
            raise self._damaged("the file is missing")
        with self.path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            if size < len(MAGIC) + FOOTER_BYTES:
                raise self._damaged(f"truncated to {size} bytes")
            stream.seek(size - FOOTER_BYTES)
            footer = stream.read(FOOTER_BYTES)
            rows, offset = (int(number) for number in np.frombuffer(footer[:16], "<u8"))
            if footer[32:] != MAGIC or offset + rows * ROW.itemsize + FOOTER_BYTES != size:
                raise self._damaged(f"truncated or overwritten: no footer at byte {size - FOOTER_BYTES}")
            stream.seek(offset)
            content = stream.read(rows * ROW.itemsize)
        if xxhash.xxh3_128_digest(content + footer[:16]) != footer[16:32]:
            raise self._damaged("the table's checksum does not match")
        return np.frombuffer(content, ROW)

    def segment(self, task: int) -> Segment:
        """The segment of a task, `EMPTY` where the file has none."""
        row = self._rows.get(task)
        if row is None:
            return EMPTY
        return Segment(Mode(int(row["mode"])), int(row["width"]), int(row["narrow"]), int(row["wide"]))

    def verify(self, grid: Sequence[Task]) -> None:
        """Read the whole file once, and check every payload against its checksum and its segment."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self.nbytes:
            raise self._damaged(
                f"the file is {'missing' if size == 0 else 'truncated'}: {size} of {self.nbytes} bytes"
            )
        for index in self._rows:
            self.payload(index, grid[index])

    def payload(self, index: int, task: Task) -> torch.Tensor | None:
        """The payload of a task, uncompressed, or None where nothing differs."""
        row = self._rows.get(index)
        if row is None:
            return None
        stored = self._read(row)
        segment = self.segment(index)
        nbytes = columns_of(task, segment).nbytes
        octets = decompress(stored.data, nbytes) if row["packed"] else stored
        if octets.size != nbytes:
            raise self._damaged(f"the segment of task {index} holds {octets.size} bytes instead of {nbytes}")
        counts = octets[columns_of(task, segment).counts].view(np.int32).reshape(task.chunks, 2)
        check_counts(segment, counts)
        return torch.from_numpy(octets if octets.flags.writeable else octets.copy())

    def stored(self, task: int) -> np.ndarray:
        """uint8[n]: what was given to the writer for a task that the file has."""
        return self._read(self._rows[task])

    def _read(self, row: np.void) -> np.ndarray:
        octets = np.empty(int(row["stored"]), np.uint8)
        if not self.path.exists():
            raise self._damaged("the file is missing")
        with self.path.open("rb", buffering=0) as stream:
            stream.seek(int(row["offset"]))
            got = stream.readinto(octets.data)
        if got != octets.size:
            raise self._damaged(f"truncated in the segment of task {int(row['task'])}")
        if xxhash.xxh3_64_intdigest(octets.data) != int(row["checksum"]):
            raise self._damaged(f"the checksum of the segment of task {int(row['task'])} does not match")
        return octets
