"""In which order, under which versions and how far the trajectories of a batch are scored.

Example: trajectory 0 has tokens of versions 7 (up to position 56), 8 (up to 89) and 9 (up to 127), trajectory 1 only of
version 9 (up to 40); version 9 is live::

    plan_visits([(0, 7, 56), (0, 8, 89), (0, 9, 127), (1, 9, 40)], live=9)
    # visit 9: trajectory 0 to length 128, trajectory 1 to length 41
    # visit 8: trajectory 0 to length 90
    # visit 7: trajectory 0 to length 57

Invariants
- Versions are visited once each, newest first, so that a chain of records is walked down one step at a time.
- A trajectory is forwarded only under versions it contains, and only up to the last token of that version: the
  probability of a token depends on nothing after it.
- Nothing is planned that cannot be restored; a missing version is named before any weight moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from megatron_async.snapshots.errors import SnapshotError, UnknownVersionError


@dataclass(frozen=True, slots=True)
class Visit:
    """One version: trajectories in the order in which they first appeared, and the length to forward of each."""

    version: int
    trajectories: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Schedule:
    """All visits of a batch, and what they cost.

    Attributes:
        visits: newest version first.
        shards: (trajectory, version) pairs, those of a reused live version included.
        reused: pairs whose log-probs come from the training forward.
        tokens: tokens that are forwarded.
        whole_tokens: what they would be without truncation: every visited trajectory to its own last token.
    """

    visits: tuple[Visit, ...]
    shards: int
    reused: int
    tokens: int
    whole_tokens: int

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(visit.version for visit in self.visits)


def plan_visits(
    uses: Iterable[tuple[int, int, int]],
    *,
    live: int,
    reuse_live: bool = False,
    available: Collection[int] | None = None,
) -> Schedule:
    """Group a batch's version spans into visits.

    Args:
        uses: (trajectory, version, position of the last token that this version produced in it); a pair given more than
            once counts up to its largest position.
        live: the version that the live weights hold; after a resume the batch may hold newer ones.
        reuse_live: leave the live version out, as the training forward gives its log-probs.
        available: versions that can be restored; None to not check.

    Raises:
        UnknownVersionError: a version is not available; names it and its trajectories.
        SnapshotError: a negative version or position.
    """
    last: dict[tuple[int, int], int] = {}
    for trajectory, version, position in uses:
        if position < 0 or version < 0:
            raise SnapshotError(
                f"trajectory {trajectory}: version {version} up to position {position}; both are counts"
            )
        key = (version, trajectory)
        last[key] = max(last.get(key, -1), position)
    _check(last, live, available)
    whole: dict[int, int] = {}
    by_version: dict[int, dict[int, int]] = {}
    for (version, trajectory), position in last.items():
        whole[trajectory] = max(whole.get(trajectory, 0), position + 1)
        by_version.setdefault(version, {})[trajectory] = position + 1
    reused = len(by_version.pop(live, {})) if reuse_live else 0
    visits = tuple(
        Visit(version, tuple(lengths), tuple(lengths.values()))
        for version, lengths in sorted(by_version.items(), reverse=True)
    )
    return Schedule(
        visits,
        shards=len(last),
        reused=reused,
        tokens=sum(visit.tokens for visit in visits),
        whole_tokens=sum(whole[trajectory] for visit in visits for trajectory in visit.trajectories),
    )


def _check(last: dict[tuple[int, int], int], live: int, available: Collection[int] | None) -> None:
    if available is None:
        return
    missing = sorted({version for version, _ in last} - set(available) - {live})
    if missing:
        owners = sorted({trajectory for version, trajectory in last if version in missing})
        raise UnknownVersionError(
            f"versions {missing} of trajectories {owners} cannot be restored (available: {sorted(available)}). Retain "
            "versions until their trajectories are trained; drop these, or score them by another source"
        )
