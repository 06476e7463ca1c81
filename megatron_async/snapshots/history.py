"""What every history of the weights can do, whichever way it keeps them."""

from __future__ import annotations

from collections.abc import Iterable
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


class Journey(Protocol):
    """Weights on the move: `go` to any number of versions, leave the context to come back."""

    report: TravelReport

    def go(self, version: int) -> None:
        """Put the live weights at a version."""


class WeightHistory(Protocol):
    """The interface that scoring uses; `SnapshotStore` and `FullCopyStore` implement it."""

    @property
    def live_version(self) -> int: ...

    def versions(self) -> list[int]: ...

    def capture(self, version: int, parent: int | None = None) -> CaptureReport: ...

    def at(self, version: int) -> AbstractContextManager[TravelReport]: ...

    def journey(self) -> AbstractContextManager[Journey]: ...

    def retain(self, version: int) -> None: ...

    def release(self, version: int) -> None: ...

    def set_needed(self, versions: Iterable[int]) -> None: ...

    def usage(self) -> dict[str, int]: ...

    def close(self) -> None: ...
