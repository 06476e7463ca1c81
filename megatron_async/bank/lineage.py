"""How far versions lie apart, when a resumed run numbers on: gaps are counted in updates, not in ids.

A version id is never used twice. A run that resumes at version 10, after 15 were made, goes on with 16, whose parent is
10: version 16 has as many updates behind it as the lost version 11, and tokens of 15 are four updates ahead of it, not
one behind. Ids therefore name weights, and the distance between weights is read from the graph of versions. A token of
a lost version that is ahead of the present one is as good as one of the version that will take its place.
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
        self._parents = [0]
        self._made_at = dict(made_at or {})
        for version, parent in sorted(versions):
            if parent is not None:
                self.add(version, parent)

    def add(self, version: int, parent: int, *, made_at: float | None = None) -> None:
        """A version made by one update of its parent."""
        if made_at is not None:
            self._made_at[version] = made_at
        missing = version + 1 - len(self._updates)
        if missing > 0:
            self._updates = np.concatenate([self._updates, np.zeros(missing, np.int64)])
            self._parents += [0] * missing
        self._updates[version] = self._updates[parent] + 1
        self._parents[version] = parent

    @property
    def newest(self) -> int:
        """The highest id."""
        return len(self._updates) - 1

    def updates(self, version: int) -> int:
        """Updates behind a version; of one that is not known (an engine made it up), behind the nearest known id."""
        return int(self._updates[min(max(version, 0), self.newest)])

    def lost(self, version: int, current: int) -> bool:
        """Whether a version lies on a branch that a resume has left: the current one was not made from it, nor can it
        be the next one, whose id is not known yet.

        >>> line = Lineage([(0, None), (1, 0), (2, 1), (3, 1)])
        >>> [line.lost(version, 3) for version in (1, 2, 3, 4)]
        [False, True, False, False]
        """
        if version > self.newest:
            return False
        while current > version:
            current = self._parents[current]
        return current != version

    def oldest_within(self, current: int, gap: int) -> int:
        """The lowest id that lies at most `gap` updates behind the current one: nothing older is needed any more.

        >>> Lineage([(0, None), (1, 0), (2, 1), (3, 2)]).oldest_within(3, 2)
        1

        After a resume higher ids may lie further back, so this keeps versions and never judges a trajectory.
        """
        near = self.gaps(current, np.arange(len(self._updates))) <= gap
        oldest = int(near.argmax())  # the current one is near
        # A young run needs everything; below 0 lie only the tokens that no version sampled.
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
