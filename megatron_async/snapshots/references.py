"""Which versions must stay: those that are referred to, those declared needed, and the newest.

Invariant: a version is kept until it was released as often as it was retained, and is not in the newest declaration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from megatron_async.snapshots.errors import SnapshotError


class References:
    """keep_last: newest versions that stay although nothing refers to them."""

    def __init__(self, keep_last: int) -> None:
        self._keep_last = keep_last
        self._counts: Counter[int] = Counter()
        self._needed: set[int] = set()

    def retain(self, version: int) -> None:
        self._counts[version] += 1

    def release(self, version: int) -> None:
        """Raises SnapshotError when the version was released more often than it was retained."""
        if self._counts[version] <= 0:
            raise SnapshotError(f"version {version} was released more often than it was retained")
        self._counts[version] -= 1

    def declare(self, versions: Iterable[int]) -> None:
        """Replace the declaration of needed versions."""
        self._needed = set(versions)

    def forget(self, version: int) -> None:
        """The version is gone, whatever referred to it."""
        self._counts.pop(version, None)
        self._needed.discard(version)

    def kept(self, known: Collection[int], live: int) -> set[int]:
        """Those of the known versions that must stay."""
        newest = sorted(known)[-self._keep_last :] if self._keep_last > 0 else []
        held = {version for version, count in self._counts.items() if count > 0}
        return (held | self._needed | set(newest) | {live}) & set(known)
