"""What a rollout process that was killed left running, sorted by whether it can go on.

An episode goes on when its environment can be replayed, something of it was written down, and its oldest token is not
too old to be trained. Ages are compared by version ids, which after a resume lie further apart than updates do: an
episode that could just go on may then begin anew, one that is too old never goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_async.rollout.environments.base import ReplayableTaskSource, Task, TaskSource
from megatron_async.trajectory import Trajectory


class CutEpisodes:
    """cut: running trajectories as last written down. oldest: the lowest version a token may have to be trained."""

    def __init__(self, cut: Sequence[Trajectory], source: TaskSource, oldest: int) -> None:
        self._usable: dict[str, list[Trajectory]] = {}
        self._lost: dict[str, list[str]] = {}
        self._unclaimed = {trajectory.trajectory_id for trajectory in cut}
        for trajectory in cut:
            fresh = trajectory.min_version is None or trajectory.min_version >= oldest
            if len(trajectory) and fresh and _replayable(source, trajectory):
                self._usable.setdefault(trajectory.group_id, []).append(trajectory)
            else:
                self._lost.setdefault(trajectory.group_id, []).append(trajectory.trajectory_id)

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
