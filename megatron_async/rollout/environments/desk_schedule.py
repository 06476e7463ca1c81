"""A service desk whose policy changes while the agent learns: online learning with a reward that shifts.

Invariants: which policy judges a training task is a function of its place in the order of tasks alone, so a restarted
run goes on in the same phase; a group of trajectories plays under one policy; held-out tasks are judged by the last
phase's, so an evaluation says how far the agent has followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_async.rollout.environments.base import Split, Task
from megatron_async.rollout.environments.desk import TRAIN_TASKS, DeskEnvironment, DeskTasks
from megatron_async.rollout.environments.desk_policy import DeskPolicy, policy_from
from megatron_async.rollout.environments.desk_world import draw_task


@dataclass(frozen=True, slots=True)
class Phase:
    """The desk's policy for `tasks` training tasks in a row; None: to the end."""

    policy: DeskPolicy
    tasks: int | None


def parse_schedule(entries: object) -> tuple[Phase, ...]:
    """Phases from `[{policy: …, tasks: …}, …]`; only the last may leave `tasks` out. ValueError says what is wrong."""
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ValueError(f"desk schedule: expected a list of {{policy, tasks}}, got {entries!r}")
    phases = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not {"policy"} <= set(entry) <= {"policy", "tasks"}:
            raise ValueError(f"desk schedule: phase {number} is {entry!r}; give policy and tasks")
        tasks = entry.get("tasks")
        if tasks is None and number < len(entries) - 1:
            raise ValueError(
                f"desk schedule: phase {number} of {len(entries)} needs tasks, only the last goes on"
            )
        if tasks is not None and (not isinstance(tasks, int) or tasks < 1):
            raise ValueError(f"desk schedule: phase {number} has tasks {tasks!r}; it must be at least 1")
        phases.append(Phase(policy_from(entry["policy"]), tasks))
    return tuple(phases)


@dataclass(frozen=True)
class ScheduledDeskTasks:
    """Desk tasks in a fixed order, judged by the policy of their phase; after the last phase it begins anew.

    stated: the system prompt states the policy that judges. False keeps the first phase's text: only the reward tells
    that the desk has changed its mind.
    """

    split: Split
    phases: tuple[Phase, ...]
    seed: int = 0
    stated: bool = True

    @property
    def size(self) -> int | None:
        """Endless in training, so that tasks come in the order of their numbers."""
        return self._tasks.size if self.split == "heldout" else None

    @property
    def _tasks(self) -> DeskTasks:
        return DeskTasks(self.split, self.phases[0].policy, self.seed)

    def phase(self, index: int) -> int:
        """Number of the phase that training task `index` belongs to."""
        if self.split == "heldout":
            return len(self.phases) - 1
        ends = self.phases[-1].tasks
        if ends is not None:
            index %= sum(phase.tasks or 0 for phase in self.phases)
        for number, phase in enumerate(self.phases[:-1]):
            index -= phase.tasks or 0
            if index < 0:
                return number
        return len(self.phases) - 1

    def task(self, index: int) -> Task:
        """Task `index` with its phase, the policy that judges and the one that is stated."""
        drawn = self._tasks.task(index if self.split == "heldout" else index % TRAIN_TASKS)
        number = self.phase(index)
        judging = self.phases[number].policy.to_json()
        stated = judging if self.stated else self.phases[0].policy.to_json()
        data = {**drawn.data, "policy": judging, "stated_policy": stated, "phase": number}
        return Task(f"{drawn.task_id}-phase{number}", data)

    def replayable(self, task: Task) -> bool:
        """Its answers are a function of the task and the turns."""
        return True

    def environment(self, task: Task) -> DeskEnvironment:
        """A fresh episode of `task`."""
        case = draw_task(task.data["number"], policy_from(task.data["policy"]))
        return DeskEnvironment(case, policy_from(task.data["stated_policy"]))
