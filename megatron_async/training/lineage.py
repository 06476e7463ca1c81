"""How far versions lie apart, when a resumed run numbers on: gaps are counted in updates, not in ids.

A version id is never used twice. A run that resumes at version 10, after 15 were made, goes on with 16, whose parent is
10: version 16 has as many updates behind it as the lost version 11, and tokens of 15 are four updates ahead of it, not
one behind. Ids therefore name weights, and the distance between weights is read from the graph of versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray


class Lineage:
    """Updates behind each version, and when it was made (Unix seconds) where that is known.

    >>> line = Lineage([(0, None), (1, 0), (2, 1), (3, 1)])
    >>> line.gaps(3, np.array([0, 1, 2, 3, -1])).tolist()
    [2, 1, 0, 0, 0]
    """

    def __init__(
        self,
        versions: Iterable[tuple[int, int | None]] = ((0, None),),
        made_at: Mapping[int, float] | None = None,
    ) -> None:
        self._updates = np.zeros(1, np.int64)
        self._made_at = dict(made_at or {})
        self._unsampled: set[int] = set()
        for version, parent in sorted(versions):
            if parent is not None:
                self.add(version, parent)

    def add(
        self, version: int, parent: int, *, sampled: bool = True, made_at: float | None = None
    ) -> None:
        """A version made by one update of its parent. sampled: False if no engine ever gets it."""
        if made_at is not None:
            self._made_at[version] = made_at
        missing = version + 1 - len(self._updates)
        if missing > 0:
            self._updates = np.concatenate([self._updates, np.zeros(missing, np.int64)])
        self._updates[version] = self._updates[parent] + 1
        if not sampled:
            self._unsampled.add(version)

    def oldest_within(self, current: int, gap: int) -> int:
        """The lowest id from which on no sampled version lies more than `gap` updates behind the current one.

        >>> Lineage([(0, None), (1, 0), (2, 1), (3, 2)]).oldest_within(3, 2)
        1

        Trajectories that waited when a run was killed carry ids of the lost branch; where the versions that repeated
        its steps were never sampled from, they stay within the bound as long as they would have.
        """
        near = self.gaps(current, np.arange(len(self._updates))) <= gap
        oldest = len(self._updates) - 1
        for version in range(len(self._updates) - 1, -1, -1):
            if not (near[version] or version in self._unsampled):
                break
            oldest = version
        # A young run bounds nothing; below 0 lie only the tokens that no version sampled.
        return oldest if oldest > 0 else min(0, current - gap)

    def gaps(self, current: int, versions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Updates that lie between tokens' versions and the current one, int64, of the shape of `versions`.

        0 for tokens without a version (-1), and for those of a lost branch that was ahead of the current version.
        """
        known = np.clip(versions, 0, len(self._updates) - 1)
        gaps = np.maximum(self._updates[current] - self._updates[known], 0)
        return np.where(np.asarray(versions) < 0, 0, gaps).astype(np.int64)

    def seconds(self, now: float, versions: NDArray[np.integer]) -> NDArray[np.float64] | None:
        """Age of the weights that sampled each token, float64, of the shape of `versions`; None if no time is known.

        0 for tokens without a version (-1) or with one whose time is not known.
        """
        if not self._made_at:
            return None
        made = np.full(len(self._updates), now)
        for version, at in self._made_at.items():
            if version < len(made):
                made[version] = at
        known = np.clip(versions, 0, len(made) - 1)
        return np.where(np.asarray(versions) < 0, 0.0, np.maximum(now - made[known], 0.0))
