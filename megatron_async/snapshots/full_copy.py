"""Full copies: one complete state per version, as today's trainers keep them.

The baseline that the differences are measured against, and the choice for weights that change almost everywhere (fp32
parameters without masters). Same interface and same digests as `SnapshotStore`; memory only.

Invariants
- Memory is allocated once, as `host_bytes`; a version takes the size of the weights of it.
- A version that is retained, declared needed, live, or among the `keep_last` newest is never removed.
- The live version always has a copy, so coming back never depends on a record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megatron_async.snapshots.arena import Block, HostArena
from megatron_async.snapshots.bits import Task, check_tensors
from megatron_async.snapshots.errors import BudgetExceededError, DigestMismatchError, UnknownVersionError
from megatron_async.snapshots.history import CaptureReport
from megatron_async.snapshots.references import References
from megatron_async.snapshots.settings import SnapshotConfig
from megatron_async.snapshots.travel import Traveller
from megatron_async.snapshots.walker import Weights


@dataclass(frozen=True, slots=True)
class FullCopy:
    """The bits of a version by tensor, and their digests."""

    blocks: tuple[Block, ...]
    digests: np.ndarray


class FullCopyStore(Traveller):
    """Keeps every version as a copy in host memory; see the module, and `WeightHistory` for the methods.

    Args:
        tensors: live tensors by name, as for `SnapshotStore`.
        version: the version whose bits they hold now; it is copied at once.
        config: `host_bytes`, `threads`, `keep_last`, `verify`, `pin_memory` and `deadline_s` count.

    Raises:
        TensorSetError: the tensors cannot be versioned.
        BudgetExceededError: `host_bytes` does not hold one copy.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, version: int, config: SnapshotConfig) -> None:
        check_tensors(tensors)
        super().__init__(version, config)
        self._weights = Weights(tensors, task_words=config.task_words, threads=config.threads)
        self._arena = HostArena(config.host_bytes, config.pin_memory)
        self._copies: dict[int, FullCopy] = {}
        self._references = References(config.keep_last)
        self._copies[version] = self._copy(version)

    def versions(self) -> list[int]:
        """Versions that can be restored."""
        return sorted(self._copies)

    def check(self, version: int) -> None:
        """Raises UnknownVersionError for a version that cannot be restored."""
        self._demand(version)

    def usage(self) -> dict[str, int]:
        """Bytes by tier."""
        return {"host": self._arena.used}

    def close(self) -> None:
        """Stop the threads."""
        self._weights.close()

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
            gone = sorted(set(self._copies) - self._references.kept(self._copies, self._live))
            for version in gone:
                for block in self._copies.pop(version).blocks:
                    self._arena.release(block)
                self._references.forget(version)
            return gone

    def capture(self, version: int, parent: int | None = None) -> CaptureReport:
        """Copy the bits that the live tensors hold now.

        Raises:
            BudgetExceededError: no room for another copy; nothing changed.
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
            return CaptureReport(version, parent, self._weights.nbytes, 1.0, "host", seconds, 0.0)

    def _copy(self, version: int) -> FullCopy:
        blocks: list[Block] = []
        for words in self._weights.words:
            block = self._arena.allocate(words.numel() * words.element_size())
            if block is None:
                for taken in blocks:
                    self._arena.release(taken)
                raise BudgetExceededError(
                    f"version {version}: a copy of {self._weights.nbytes:,} bytes does not fit; host_bytes is "
                    f"{self._arena.capacity:,}, of which {self._arena.used:,} hold versions {sorted(self._copies)}. "
                    "Raise host_bytes, release versions that no token needs, or keep differences (SnapshotStore)"
                )
            blocks.append(block)

        def work(index: int, task: Task) -> int | torch.Tensor:
            self._part(blocks, task).copy_(self._weights.of(task))
            return self._weights.kernels.digest(task, self._weights.of(task))

        return FullCopy(tuple(blocks), self._weights.per_tensor(self._weights.run(work)))

    def _part(self, blocks: list[Block] | tuple[Block, ...], task: Task) -> torch.Tensor:
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
            self._weights.of(task).copy_(self._part(full.blocks, task))
            return self._weights.kernels.digest(task, self._weights.of(task)) if verify else 0

        digests = self._weights.per_tensor(self._weights.run(work))
        name = self._mismatch(full, digests) if verify else None
        if name is not None:
            before = self._copies[self._live]
            self._weights.run(
                lambda index, task: self._weights.of(task).copy_(self._part(before.blocks, task))
            )
            raise DigestMismatchError(
                f"the copy of version {version} was damaged in memory (tensor '{name}'); the weights are at version "
                f"{self._live} again. Drop or rescore the tokens of version {version}"
            )
        self._live = version
        return 1

    def _mismatch(self, full: FullCopy, digests: np.ndarray) -> str | None:
        differing = np.flatnonzero(full.digests != digests)
        return self._weights.specs[int(differing[0])].name if differing.size else None

    def _demand(self, version: int) -> FullCopy:
        if version not in self._copies:
            raise UnknownVersionError(
                f"version {version} is not in memory, which holds copies of {sorted(self._copies)}. Retain a version "
                "while any token needs it; tokens of a lost version can only be dropped or scored by another source"
            )
        return self._copies[version]
