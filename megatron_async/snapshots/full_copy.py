"""Full copies: one complete state per version, as today's trainers keep them.

The baseline that the differences are measured against, and the choice for weights that change almost everywhere (fp32
parameters without masters). Same interface and same digests as `SnapshotStore`.

Invariants
- Memory is allocated once, as `host_bytes`; a version takes the size of the weights of it. With a directory, the oldest
  copies move there when memory is full; a durable store writes every copy there as it is made.
- A version that is retained, declared needed, live, or among the `keep_last` newest is never removed.
- The live version always has a copy, so coming back never depends on a record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_async.snapshots.arena import Block, HostArena
from megatron_async.snapshots.bits import Task, host_words
from megatron_async.snapshots.codec import Mode, Segment
from megatron_async.snapshots.errors import (
    BudgetExceededError,
    DamagedRecordError,
    DigestMismatchError,
    UnknownVersionError,
)
from megatron_async.snapshots.history import CaptureReport
from megatron_async.snapshots.record_file import RecordFile, RecordWriter
from megatron_async.snapshots.references import References
from megatron_async.snapshots.settings import SnapshotConfig
from megatron_async.snapshots.travel import Traveller


@dataclass(slots=True)
class FullCopy:
    """The bits of a version by tensor, and their digests. blocks: in memory, or None; file: on disk, or None."""

    digests: np.ndarray
    blocks: tuple[Block, ...] | None
    file: RecordFile | None = None


class FullCopyStore(Traveller):
    """Keeps every version as a copy, in host memory or on disk; see the module, and `WeightHistory` for the methods.

    Args:
        tensors: live tensors by name, as for `SnapshotStore`.
        version: the version whose bits they hold now; it is copied at once.
        config: `host_bytes`, `disk_bytes`, `durable`, `threads`, `keep_last`, `verify`, `pin_memory` and `deadline_s`
            count.
        directory: where copies are kept on disk; those that an earlier store left there can be restored.

    Raises:
        TensorSetError: the tensors cannot be versioned, or the directory was written for others.
        BudgetExceededError: the budgets do not hold one copy.
        DigestMismatchError: the directory knows the version with other bits.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        config: SnapshotConfig,
        directory: Path | str | None = None,
    ) -> None:
        super().__init__(tensors, version, config, directory, kind="full copies, ")
        self._arena = HostArena(config.host_bytes, config.pin_memory)
        self._copies: dict[int, FullCopy] = {}
        self._damage: dict[int, str] = {}
        self._references = References(config.keep_last)
        try:
            self._open(version)
        except BaseException:
            self.close()
            raise

    def _open(self, version: int) -> None:
        for known in self._directory.entries if self._directory is not None else ():
            self._reopen(known)
        if version not in self._copies:
            self._copies[version] = self._copy(version)
            return
        name = self._mismatch(self._copies[version], self._weights.digests())
        if name is not None:
            raise DigestMismatchError(
                f"the live weights are not version {version}: the bits of tensor '{name}' differ from its copy on "
                "disk. Load the weights that were published under this version, or give these another number"
            )

    def _reopen(self, version: int) -> None:
        assert self._directory is not None, "copies were found in it"
        try:
            file = RecordFile(self._directory.keyframe_path(version))
            self._copies[version] = FullCopy(self._directory.digests(version), None, file)
        except DamagedRecordError as error:
            self._damage[version] = str(error)

    def versions(self) -> list[int]:
        """Versions that can be restored."""
        return sorted(self._copies)

    def check(self, version: int) -> None:
        """Raises UnknownVersionError for a version that cannot be restored."""
        self._demand(version)

    def usage(self) -> dict[str, int]:
        """Bytes by tier."""
        return {"host": self._arena.used, "disk": self._directory.used if self._directory is not None else 0}

    def close(self) -> None:
        """Stop the threads and let go of the directory; files stay."""
        self._weights.close()
        if self._directory is not None:
            self._directory.close()

    def retain(self, version: int) -> None:
        """Keep a version until it was released as often as it was retained."""
        with self._turn():
            self._demand(version)
            self._references.retain(version)

    def release(self, version: int) -> None:
        """Undo one `retain`."""
        with self._turn():
            self._references.release(version)

    def set_needed(self, versions: Iterable[int]) -> None:
        """Declare which versions must stay besides those retained; replaces the declaration before."""
        with self._turn():
            needed = set(versions)
            for version in needed:
                self._demand(version)
            self._references.declare(needed)

    def collect(self) -> list[int]:
        """Remove every version that need not stay."""
        with self._turn():
            kept = self._references.kept(self._copies, self._live)
            gone = sorted(set(self._copies) - kept)
            for version in gone:
                self._release(self._copies.pop(version))
                self._references.forget(version)
            unreadable = [version for version in self._damage if version < min(kept)]
            for version in [*gone, *unreadable]:
                self._damage.pop(version, None)
                if self._directory is not None:
                    self._directory.remove(version)
            return gone

    def _release(self, full: FullCopy) -> None:
        """Free the memory of a copy."""
        blocks, full.blocks = full.blocks, None
        for block in blocks or ():
            self._arena.release(block)

    def capture(self, version: int, parent: int | None = None) -> CaptureReport:
        """Copy the bits that the live tensors hold now.

        Raises:
            BudgetExceededError: no room for another copy, in memory or on disk; nothing changed.
            SnapshotBusyError: called inside `at`.
            SnapshotError: the number was used, or the parent is not the live version.
        """
        with self._turn():
            self._check_new(version, parent, is_known=version in self._copies)
            began, parent = time.perf_counter(), self._live
            self.collect()
            self._copies[version] = self._copy(version)
            self._live = version
            seconds = time.perf_counter() - began
            tier = "disk" if self._copies[version].blocks is None else "host"
            return CaptureReport(version, parent, self._weights.nbytes, 1.0, tier, seconds, 0.0)

    def _copy(self, version: int) -> FullCopy:
        """A copy of the live weights: in memory where that has or can be given room, and on disk if it must be."""
        blocks = self._allocate()
        while blocks is None and self._move_to_disk():
            blocks = self._allocate()
        if blocks is None and self._directory is None:
            raise BudgetExceededError(
                f"version {version}: a copy of {self._weights.nbytes:,} bytes does not fit; host_bytes is "
                f"{self._arena.capacity:,}, of which {self._arena.used:,} hold versions {sorted(self._copies)}. "
                "Raise host_bytes, release versions that no token needs, or keep differences (SnapshotStore)"
            )

        def work(index: int, task: Task) -> int | torch.Tensor:
            words = self._weights.of(task)
            if blocks is not None:
                self._in_memory(blocks, task).copy_(words)
            return self._weights.kernels.digest(task, words)

        full = FullCopy(self._weights.per_tensor(self._weights.run(work)), blocks)
        if blocks is None or (self._directory is not None and self.config.durable):
            try:
                self._write(version, full, lambda index, task: self._weights.of(task))
            except BaseException:
                self._release(full)
                raise
        return full

    def _allocate(self) -> tuple[Block, ...] | None:
        """Memory for one copy; None where there is not enough."""
        blocks: list[Block] = []
        for words in self._weights.words:
            block = self._arena.allocate(words.numel() * words.element_size())
            if block is None:
                for taken in blocks:
                    self._arena.release(taken)
                return None
            blocks.append(block)
        return tuple(blocks)

    def _move_to_disk(self) -> bool:
        """Free the memory of the oldest copy there; False where there is none, or no directory."""
        in_memory = [known for known, full in self._copies.items() if full.blocks is not None]
        if self._directory is None or not in_memory:
            return False
        full = self._copies[min(in_memory)]
        if full.file is None:
            self._write(min(in_memory), full, lambda index, task: self._part(full, index, task))
        self._release(full)
        return True

    def _write(self, version: int, full: FullCopy, source: Callable[[int, Task], torch.Tensor]) -> None:
        """Put a copy on disk, whole and durable before it counts. Raises DiskFullError."""
        assert self._directory is not None, "asked for only where there is one"
        with RecordWriter(self._directory.keyframe_path(version), self._directory.room()) as writer:
            for index, task in enumerate(self._weights.grid):
                words = host_words(source(index, task).cpu())
                writer.add(index, Segment(Mode.DENSE, task.word), words.view(np.uint8), packed=False)
            file = writer.finish()
        self._directory.put(version, None, full.digests, record=False, keyframe=True)
        full.file = file

    def _part(self, full: FullCopy, index: int, task: Task) -> torch.Tensor:
        """The words of a task in a copy."""
        if full.blocks is not None:
            return self._in_memory(full.blocks, task)
        assert full.file is not None, "a copy is in memory or on disk"
        return torch.from_numpy(full.file.stored(index)).view(self._weights.words[task.tensor].dtype)

    def _in_memory(self, blocks: tuple[Block, ...], task: Task) -> torch.Tensor:
        words = blocks[task.tensor].data.view(self._weights.words[task.tensor].dtype)
        return words[task.start : task.start + task.length]

    def _go(self, version: int) -> int:
        self._weights.check_memory()
        full = self._demand(version)
        if version == self._live:
            name = self._mismatch(full, self._weights.digests())
            if name is None:
                return 0
        verify = self.config.verify == "full"

        def work(index: int, task: Task) -> int | torch.Tensor:
            self._weights.of(task).copy_(self._part(full, index, task))
            return self._weights.kernels.digest(task, self._weights.of(task)) if verify else 0

        try:
            digests = self._weights.per_tensor(self._weights.run(work))
        except DamagedRecordError:
            self._put_back()
            raise
        name = self._mismatch(full, digests) if verify else None
        if name is not None:
            self._put_back()
            raise DigestMismatchError(
                f"the copy of version {version} is damaged (tensor '{name}'); the weights are at version "
                f"{self._live} again. Drop or rescore the tokens of version {version}"
            )
        self._live = version
        return 1

    def _put_back(self) -> None:
        """Overwrite the weights with the copy of the live version."""
        before = self._copies[self._live]
        self._weights.overwrite(lambda index, task: self._part(before, index, task))

    def _mismatch(self, full: FullCopy, digests: np.ndarray) -> str | None:
        differing = np.flatnonzero(full.digests != digests)
        return self._weights.specs[int(differing[0])].name if differing.size else None

    def _demand(self, version: int) -> FullCopy:
        if version in self._damage:
            raise DamagedRecordError(f"version {version} cannot be restored. {self._damage[version]}")
        if version not in self._copies:
            where = "memory" if self._directory is None else f"memory or {self._directory.path}"
            raise UnknownVersionError(
                f"version {version} is not in {where}; there are copies of {sorted(self._copies)}. Retain a version "
                "while any token needs it; tokens of a lost version can only be dropped or scored by another source"
            )
        return self._copies[version]
