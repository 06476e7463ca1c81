"""Journeys of the live weights through their history, whichever way it is kept.

Invariants
- One thread at a time uses the weights; others wait, and not for ever.
- A journey comes back to where it began, whatever happens inside it.
- Nothing is captured on a journey.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from megatron_async.snapshots.bits import check_tensors, signature
from megatron_async.snapshots.directory import Directory
from megatron_async.snapshots.errors import SnapshotBusyError, SnapshotError
from megatron_async.snapshots.history import Journey, TravelReport
from megatron_async.snapshots.settings import SnapshotConfig
from megatron_async.snapshots.walker import Weights


class Traveller(ABC):
    """What `SnapshotStore` and `FullCopyStore` share: the weights, the directory, turns and journeys.

    tensors, version, config, directory: as for the stores. kind: what the directory holds, a part of its signature.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int,
        config: SnapshotConfig,
        directory: Path | str | None,
        kind: str,
    ) -> None:
        check_tensors(tensors)
        self.config = config
        self._weights = Weights(tensors, task_words=config.task_words, threads=config.threads)
        self._directory: Directory | None = None
        if directory is not None:
            text = kind + signature(self._weights.specs, self._weights.task_words)
            self._directory = Directory(Path(directory), text, config.disk_bytes)
        self._live = version
        self._away = False
        self._lock = threading.RLock()

    @property
    def live_version(self) -> int:
        """The version whose bits the live tensors hold."""
        return self._live

    @abstractmethod
    def _go(self, target: int) -> int:
        """Put the live weights at a version; returns the steps taken. An error leaves them where they are."""

    def _come_back(self, origin: int) -> None:
        """End a journey."""
        self._go(origin)

    def _before_turn(self) -> None:
        """Called by a thread before it waits for its turn."""
        return

    @abstractmethod
    def close(self) -> None:
        """Finish what runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @contextmanager
    def at(self, version: int) -> Iterator[TravelReport]:
        """Live weights at a version while the block runs, and back where they were afterwards.

        Raises:
            UnknownVersionError, DamagedRecordError, DigestMismatchError: before the block; weights as they were.
            DigestMismatchError: after the block, when it wrote to the weights.
        """
        with self.journey() as journey:
            journey.go(version)
            yield journey.report

    @contextmanager
    def journey(self) -> Iterator[Journey]:
        """Visit several versions, one step each, and come back at the end: `journey.go(7); ...; journey.go(6)`."""
        with self._turn():
            outer, origin = self._away, self._live
            journey = Journey(self._go)
            self._away = True
            try:
                yield journey
            finally:
                began = time.perf_counter()
                try:
                    if journey.report.visited:
                        self._come_back(origin)
                finally:
                    self._away = outer
                    journey.report.return_seconds = time.perf_counter() - began

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._before_turn()
        if not self._lock.acquire(timeout=self.config.deadline_s):
            raise SnapshotBusyError(
                f"another thread has used the weights for {self.config.deadline_s} s (live version {self._live}); "
                "leave its `with store.at(...)` block first, or raise deadline_s"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _refuse_away(self, what: str) -> None:
        if self._away:
            raise SnapshotBusyError(
                f"{what} inside `with store.at(...)`: the weights are at version {self._live}"
            )

    def _check_new(self, version: int, parent: int | None, *, is_known: bool) -> None:
        """Refuse a capture on a journey, of a number used before, or from another parent than the live version."""
        self._refuse_away("capture()")
        if is_known:
            raise SnapshotError(
                f"version {version} was captured before; a version number is never used twice"
            )
        if parent is not None and parent != self._live:
            raise SnapshotError(
                f"the live weights came from version {self._live}, not from the given parent {parent}"
            )
