"""What every history of the weights can do, whichever way it keeps them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """One capture.

    Attributes:
        nbytes: bytes that one copy of the version's record takes.
        changed: share of words that differ from the parent (an upper bound where a task is stored dense).
        tier: where the record went first.
        seconds: how long it took, without the writing that `durable_seconds` counts.
    """

    version: int
    parent: int
    nbytes: int
    changed: float
    tier: str
    seconds: float
    durable_seconds: float


@dataclass(slots=True)
class TravelReport:
    """Seconds and steps of one journey, there and back."""

    seconds: float = 0.0
    return_seconds: float = 0.0
    steps: int = 0
    visited: list[int] = field(default_factory=list)


class Journey:
    """The live weights on the move: `go` to any number of versions; the context that gave the journey comes back.

    `go_to` walks to a version and returns the steps taken.
    """

    def __init__(self, go_to: Callable[[int], int]) -> None:
        self.report = TravelReport()
        self._go_to = go_to

    def go(self, version: int) -> None:
        """Put the live weights at a version.

        Raises:
            UnknownVersionError, DamagedRecordError, DigestMismatchError: the weights stay where they are.
        """
        began = time.perf_counter()
        self.report.steps += self._go_to(version)
        self.report.seconds += time.perf_counter() - began
        self.report.visited.append(version)


class WeightHistory(Protocol):
    """The interface that scoring uses; `SnapshotStore` and `FullCopyStore` implement it."""

    @property
    def live_version(self) -> int: ...

    def versions(self) -> list[int]: ...

    def check(self, version: int) -> None:
        """Raises UnknownVersionError or DamagedRecordError for a version that cannot be restored; nothing moves."""

    def capture(self, version: int, parent: int | None = None) -> CaptureReport: ...

    def at(self, version: int) -> AbstractContextManager[TravelReport]: ...

    def journey(self) -> AbstractContextManager[Journey]: ...

    def retain(self, version: int) -> None: ...

    def release(self, version: int) -> None: ...

    def set_needed(self, versions: Iterable[int]) -> None: ...

    def usage(self) -> dict[str, int]: ...

    def close(self) -> None: ...
