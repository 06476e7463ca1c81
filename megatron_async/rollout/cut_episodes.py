"""What a rollout process that was killed left running, sorted by whether it can go on.

An episode goes on when its environment can be replayed, something of it was written down, and its oldest token is not
too old to be trained. Ages are counted in updates along the lineage, so an episode with tokens of a version that a
resume has left goes on too: the tokens to come are of another branch, and each is trained as of its own version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_async.rollout.environments.base import ReplayableTaskSource, Task, TaskSource
from megatron_async.trajectory import Trajectory


class CutEpisodes:
    """cut: running trajectories as last written down. updates: behind a version. least: the fewest that a token's
    version may have to be trained."""

    def __init__(
        self, cut: Sequence[Trajectory], source: TaskSource, updates: Callable[[int], int], least: int
    ) -> None:
        self._updates = updates
        self._usable: dict[str, list[Trajectory]] = {}
        self._lost: dict[str, list[str]] = {}
        self._unclaimed = {trajectory.trajectory_id for trajectory in cut}
        for trajectory in cut:
            oldest = self.oldest(trajectory)
            fresh = oldest is None or oldest >= least
            if len(trajectory) and fresh and _replayable(source, trajectory):
                self._usable.setdefault(trajectory.group_id, []).append(trajectory)
            else:
                self._lost.setdefault(trajectory.group_id, []).append(trajectory.trajectory_id)

    def oldest(self, trajectory: Trajectory) -> int | None:
        """Updates behind the oldest version of its tokens; None when it has none."""
        return min((self._updates(span.version) for span in trajectory.spans), default=None)

    def claim(self, group_id: str, count: int) -> tuple[list[Trajectory], list[str]]:
        """Up to `count` episodes of a group that go on, oldest first, and the ids of its others."""
        usable = self._usable.get(group_id, [])
        for trajectory in usable[:count]:
            self._unclaimed.discard(trajectory.trajectory_id)
        lost = [trajectory.trajectory_id for trajectory in usable[count:]]
        return usable[:count], [*self._lost.get(group_id, []), *lost]

    def unclaimed(self) -> list[str]:
        """Ids of the trajectories that nobody goes on with."""
        return sorted(self._unclaimed)


def _replayable(source: TaskSource, trajectory: Trajectory) -> bool:
    task = Task(trajectory.prompt_id, trajectory.task)
    return isinstance(source, ReplayableTaskSource) and source.replayable(task)
