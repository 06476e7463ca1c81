"""Old log-probs that were scored before their batch was built, by trajectory. Pure NumPy; every rank holds the same.

Invariant: an entry speaks of tokens that are only ever appended to, so it stays valid. It is forgotten when the
trajectory was trained on, or is too old to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _Entry:
    logprobs: NDArray[np.float32]
    oldest_version: int


class ScorePool:
    """Log-probs float32 [L] by trajectory id, NaN where a token has none."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return sum(entry.logprobs.nbytes for entry in self._entries.values())

    def add(self, trajectory_id: str, logprobs: NDArray[np.float32], oldest_version: int) -> None:
        """Replace what is known of a trajectory. oldest_version: of its tokens; what makes it too old."""
        self._entries[trajectory_id] = _Entry(logprobs, oldest_version)

    def peek(self, trajectory_id: str) -> NDArray[np.float32] | None:
        """The log-probs, or None; they may be shorter than a trajectory that has grown since."""
        entry = self._entries.get(trajectory_id)
        return None if entry is None else entry.logprobs

    def take(self, trajectory_id: str) -> NDArray[np.float32] | None:
        """The log-probs, which are then forgotten, or None."""
        entry = self._entries.pop(trajectory_id, None)
        return None if entry is None else entry.logprobs

    def forget_older_than(self, version: int) -> None:
        """Trajectories with a token older than this are never trained on."""
        kept = {key: entry for key, entry in self._entries.items() if entry.oldest_version >= version}
        self._entries = kept

    def export(self, ids: Iterable[str]) -> dict[str, tuple[int, bytes]]:
        """(oldest version, little-endian float32) of those that are known."""
        found = ((key, self._entries[key]) for key in ids if key in self._entries)
        return {key: (entry.oldest_version, entry.logprobs.astype("<f4").tobytes()) for key, entry in found}

    def restore(self, entries: Mapping[str, tuple[int, bytes]]) -> None:
        """Take in what `export` gave."""
        for key, (oldest_version, data) in entries.items():
            self.add(key, np.frombuffer(data, "<f4").astype(np.float32), oldest_version)
