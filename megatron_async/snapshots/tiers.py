"""Where records live: device memory, then preallocated host memory, then the disk, each under a declared budget.

A record that is being captured goes to the first tier. When that has no room, the oldest records there move on to the
next tier; when none is left to move, the new record itself moves on. A durable store also writes every record to disk
at once, and its memory copies are then dropped instead of moved.

Invariants
- The bytes in a tier never exceed its budget.
- A record always lives in at least one tier; nothing here decides that a version is no longer needed.
- After a refusal every tier holds what it held before, apart from records that moved on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from megatron_async.snapshots.arena import Block, HostArena
from megatron_async.snapshots.bits import Task
from megatron_async.snapshots.codec import EMPTY, Mode, Segment, columns_of, compress, decompress
from megatron_async.snapshots.errors import BudgetExceededError, DamagedRecordError
from megatron_async.snapshots.record_file import RecordFile, RecordWriter


class MemoryTier(Protocol):
    """Memory that holds payloads."""

    name: str
    budget: int

    @property
    def used(self) -> int: ...

    def put(self, payload: torch.Tensor) -> Block | None:
        """A copy of the payload in this tier, or None without room."""

    def free(self, block: Block) -> None: ...


class DeviceTier:
    """Payloads in the memory that the weights are in."""

    name = "device"

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._lock = threading.Lock()

    def put(self, payload: torch.Tensor) -> Block | None:
        with self._lock:
            if self.used + payload.numel() > self.budget:
                return None
            self.used += payload.numel()
        return Block(0, payload.numel(), payload.clone())

    def free(self, block: Block) -> None:
        with self._lock:
            self.used -= block.nbytes


class HostTier:
    """Payloads in the preallocated arena."""

    name = "host"

    def __init__(self, budget: int, pin_memory: bool) -> None:
        self.budget = budget
        self._arena = HostArena(budget, pin_memory)

    @property
    def used(self) -> int:
        return self._arena.used

    def put(self, payload: torch.Tensor) -> Block | None:
        block = self._arena.allocate(payload.numel())
        if block is not None:
            block.data.copy_(payload)
        return block

    def free(self, block: Block) -> None:
        self._arena.release(block)


@dataclass(slots=True)
class Stored:
    """A payload in memory."""

    block: Block
    packed: bool


@dataclass(slots=True)
class Record:
    """All segments of one step, in memory, on disk or both. A keyframe is a record from all-zero weights.

    Attributes:
        label: what error messages call it.
        segments: one per task of the grid.
        stored: payloads in `tier`; empty when the record is on disk only.
    """

    label: str
    segments: list[Segment]
    stored: dict[int, Stored] = field(default_factory=dict)
    tier: MemoryTier | None = None
    file: RecordFile | None = None

    @property
    def memory_bytes(self) -> int:
        return sum(stored.block.nbytes for stored in self.stored.values())

    @property
    def nbytes(self) -> int:
        """Bytes that one copy of the record takes."""
        if self.tier is None and self.file is not None:
            return self.file.nbytes
        return self.memory_bytes

    def payload(self, index: int, task: Task) -> torch.Tensor | None:
        """The payload of a task ready for the kernels, or None where nothing differs.

        Raises:
            DamagedRecordError: names this record.
        """
        segment = self.segments[index]
        if segment.mode == Mode.EMPTY:
            return None
        if index in self.stored:
            stored = self.stored[index]
            if not stored.packed:
                return stored.block.data
            octets = decompress(stored.block.data.numpy().data, columns_of(task, segment).nbytes)
            return torch.from_numpy(octets.copy())
        if self.file is None:
            raise DamagedRecordError(f"{self.label}: the payload of task {index} is in no tier")
        return self.file.payload(index, task)


class Tiers:
    """Places new records and moves old ones on."""

    def __init__(
        self,
        grid: Sequence[Task],
        memory: Sequence[MemoryTier],
        *,
        compression_level: int,
        compress_in_memory: bool,
        disk_room: Callable[[], int | None],
    ) -> None:
        self.grid = grid
        self.memory = [tier for tier in memory if tier.budget > 0]
        self.records: list[tuple[Record, Path | None]] = []
        self._level = compression_level
        self._compress_in_memory = compress_in_memory
        self._disk_room = disk_room
        self._lock = threading.RLock()

    def begin(self, label: str, path: Path | None) -> RecordBuilder:
        """A record to be filled; `path` is its file, should it need one."""
        return RecordBuilder(self, Record(label, [EMPTY] * len(self.grid)), path)

    def adopt(self, record: Record, path: Path | None) -> None:
        """Count a complete record among those that may be moved on, newest last."""
        with self._lock:
            self.records.append((record, path))

    def disown(self, record: Record) -> None:
        """Undo `adopt`."""
        with self._lock:
            self.records = [entry for entry in self.records if entry[0] is not record]

    def leave(self, record: Record) -> None:
        """Free the memory of a record, and leave its file to others."""
        with self._lock:
            self.disown(record)
            self.free_memory(record)

    def drop(self, record: Record) -> None:
        """Free a record everywhere."""
        with self._lock:
            self.leave(record)
            if record.file is not None:
                record.file.path.unlink(missing_ok=True)
                record.file = None

    def free_memory(self, record: Record) -> None:
        """Give back the memory of a record."""
        if record.tier is not None:
            for stored in record.stored.values():
                record.tier.free(stored.block)
        record.stored, record.tier = {}, None

    def make_room(self, tier: MemoryTier) -> bool:
        """Move the oldest record of a tier on; False when the tier holds none that can move."""
        with self._lock:
            for record, path in self.records:
                if record.tier is tier and (
                    record.file is not None or path is not None or tier is not self.memory[-1]
                ):
                    self._move_on(record, path)
                    return True
        return False

    def _move_on(self, record: Record, path: Path | None) -> None:
        if record.file is not None:
            self.free_memory(record)
            return
        builder = RecordBuilder(self, Record(record.label, list(record.segments)), path)
        builder.start_after(record.tier)
        try:
            for index, stored in record.stored.items():
                builder.put(index, stored.block.data, stored.packed)
            moved = builder.finish(durable=False)
        except BaseException:
            builder.discard()
            raise
        self.free_memory(record)
        record.stored, record.tier, record.file = moved.stored, moved.tier, moved.file

    def write(self, record: Record, path: Path) -> None:
        """Write a copy of a record that lives in memory.

        Raises:
            DiskFullError: nothing is left behind.
        """
        with RecordWriter(path, self._disk_room()) as writer:
            for index, stored in sorted(record.stored.items()):
                self.append(writer, index, record.segments[index], stored.block.data, stored.packed)
            record.file = writer.finish()

    def append(
        self, writer: RecordWriter, index: int, segment: Segment, payload: torch.Tensor, packed: bool
    ) -> None:
        """Append one payload to a file, compressed where that helps."""
        octets = payload.cpu().numpy()
        smaller = compress(octets, self._level) if self._level and not packed else None
        writer.add(index, segment, octets if smaller is None else smaller, packed or smaller is not None)

    def pack(self, payload: torch.Tensor) -> torch.Tensor | None:
        """The payload compressed for memory, or None unless asked for and worth it."""
        if not (self._compress_in_memory and self._level):
            return None
        packed = compress(payload.cpu().numpy(), self._level)
        return None if packed is None else torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def open_writer(self, path: Path) -> RecordWriter:
        return RecordWriter(path, self._disk_room())

    def refusal(self, label: str, nbytes: int) -> BudgetExceededError:
        """The error for a payload that fits nowhere, with the arithmetic."""
        lines = [f"{tier.name} {tier.used:,} of {tier.budget:,} bytes used" for tier in self.memory]
        held = ", ".join(f"{record.label} {record.nbytes:,}" for record, _ in self.records) or "none"
        used = "; ".join(lines) or "no memory tier"
        return BudgetExceededError(
            f"{label}: a further {nbytes:,} bytes fit in no tier ({used}; no disk tier). Held and needed, in bytes: "
            f"{held}. Raise host_bytes, give the store a directory, or release versions that no token needs"
        )


class RecordBuilder:
    """Fills one record from several threads, moving on to the next tier whenever one is full."""

    def __init__(self, tiers: Tiers, record: Record, path: Path | None) -> None:
        self.record = record
        self._tiers = tiers
        self._path = path
        self._remaining = list(tiers.memory)
        self._writer: RecordWriter | None = None
        self._lock = threading.RLock()
        record.tier = self._remaining[0] if self._remaining else None

    def disk_only(self) -> None:
        """Use no memory tier."""
        self._remaining, self.record.tier = [], None

    def start_after(self, tier: MemoryTier | None) -> None:
        """Do not use this tier or any before it."""
        while self._remaining and tier in self._remaining:
            self._remaining.pop(0)
        self.record.tier = self._remaining[0] if self._remaining else None

    def add(self, index: int, segment: Segment, payload: torch.Tensor | None) -> None:
        """Store the difference of one task.

        Raises:
            BudgetExceededError: no tier has room.
        """
        self.record.segments[index] = segment
        if payload is None:
            return
        packed = self._tiers.pack(payload)
        self.put(index, payload if packed is None else packed, packed is not None)

    def put(self, index: int, payload: torch.Tensor, packed: bool) -> None:
        """Store a payload as it is; see `add`."""
        with self._lock:
            while self.record.tier is not None:
                block = self.record.tier.put(payload)
                if block is not None:
                    self.record.stored[index] = Stored(block, packed)
                    return
                if not self._tiers.make_room(self.record.tier):
                    self._next_tier(payload.numel())
            if self._writer is None:
                self._open(payload.numel())
            assert self._writer is not None
            self._tiers.append(self._writer, index, self.record.segments[index], payload, packed)

    def _next_tier(self, nbytes: int) -> None:
        """Take everything stored so far to the next tier."""
        full, stored = self._remaining.pop(0), self.record.stored
        self.record.stored, self.record.tier = {}, self._remaining[0] if self._remaining else None
        try:
            if self.record.tier is None:
                self._open(nbytes)
            for index, entry in stored.items():
                self.put(index, entry.block.data, entry.packed)
        finally:
            for entry in stored.values():
                full.free(entry.block)

    def _open(self, nbytes: int) -> None:
        if self._path is None:
            raise self._tiers.refusal(self.record.label, nbytes)
        self._writer = self._tiers.open_writer(self._path)

    def finish(self, durable: bool) -> Record:
        """The complete record; with `durable` it is on disk as well.

        Raises:
            DiskFullError: no room for the file.
        """
        if self._writer is not None:
            self.record.file = self._writer.finish()
        elif self.record.tier is None and self._path is not None:
            with self._tiers.open_writer(self._path) as writer:
                self.record.file = writer.finish()
        elif durable and self._path is not None:
            self._tiers.write(self.record, self._path)
        return self.record

    def discard(self, *, keep_file: bool = False) -> None:
        """Free everything; the record never was."""
        if self._writer is not None:
            self._writer.discard()
        self._tiers.free_memory(self.record)
        if self.record.file is not None and not keep_file:
            self.record.file.path.unlink(missing_ok=True)


def memory_tiers(device_bytes: int, host_bytes: int, pin_memory: bool) -> list[MemoryTier]:
    """The memory tiers in the order in which they are filled."""
    return [DeviceTier(device_bytes), HostTier(host_bytes, pin_memory)]
