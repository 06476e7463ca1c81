"""The graph of versions: which steps lead from one version to another.

Versions form a tree: numbering goes on after a resume, so a version's parent need not be the number before it. A record
joins a version with its parent and is walked in both directions; a keyframe, or a copy held in memory, can be entered
from anywhere but leads nowhere.

Invariant: the planner only returns walks whose way back exists, as every scoring pass must come back.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a walk: along the record of version `key`, or (`absolute`) onto the full copy of `key`."""

    key: int
    absolute: bool
    to: int


def plan(
    origin: int, target: int, parents: Mapping[int, tuple[int, float]], copies: Mapping[int, float]
) -> list[Step] | None:
    """The cheapest walk from `origin` to `target`, or None when there is none.

    Args:
        parents: for each version that has a record: its parent, and the cost of the record.
        copies: for each version held as a full copy: the cost of entering it.
    """
    neighbours: dict[int, list[tuple[int, int, float]]] = {}
    for child, (parent, cost) in parents.items():
        neighbours.setdefault(child, []).append((parent, child, cost))
        neighbours.setdefault(parent, []).append((child, child, cost))
    best: dict[int, tuple[float, int, Step | None]] = {origin: (0.0, origin, None)}
    queue: list[tuple[float, int]] = [(0.0, origin)]
    done: set[int] = set()
    while queue:
        cost, version = heapq.heappop(queue)
        if version in done:
            continue
        done.add(version)
        if version == target:
            return _unwind(best, origin, target)
        edges = [(to, Step(key, False, to), price) for to, key, price in neighbours.get(version, [])]
        edges += [(to, Step(to, True, to), price) for to, price in copies.items()]
        for to, step, price in edges:
            if to not in done and (to not in best or cost + price < best[to][0]):
                best[to] = (cost + price, version, step)
                heapq.heappush(queue, (cost + price, to))
    return None


def _unwind(best: Mapping[int, tuple[float, int, Step | None]], origin: int, target: int) -> list[Step]:
    steps: list[Step] = []
    version = target
    while version != origin:
        _, before, step = best[version]
        assert step is not None
        steps.append(step)
        version = before
    return steps[::-1]


def removable(versions: Iterable[int], parents: Mapping[int, int], kept: Iterable[int]) -> set[int]:
    """Versions that are neither kept nor on a walk between two kept ones.

    Args:
        parents: parent of each version that has a record.
        kept: versions that must stay reachable from one another.
    """
    keep = set(kept)
    remaining = set(versions)
    degree: dict[int, set[int]] = {version: set() for version in remaining}
    for child, parent in parents.items():
        if child in remaining and parent in remaining:
            degree[child].add(parent)
            degree[parent].add(child)
    leaves = [version for version in remaining if version not in keep and len(degree[version]) <= 1]
    while leaves:
        leaf = leaves.pop()
        remaining.discard(leaf)
        for other in degree[leaf]:
            degree[other].discard(leaf)
            if other in remaining and other not in keep and len(degree[other]) <= 1 and other not in leaves:
                leaves.append(other)
        degree[leaf] = set()
    return set(versions) - remaining
