"""Which task comes next: a cursor that counts up for ever, and the task it stands for.

Invariants: the task of a cursor is a function of (source, seed, cursor) alone, so a restarted run goes on with unused
tasks; a finite source is walked in a new random order every epoch, each task once per epoch.
"""

from __future__ import annotations

import re

import numpy as np

from megatron_async.rollout.environments.base import Task, TaskSource


class PromptStream:
    """Tasks by cursor. An endless source is read in its own order; a finite one is shuffled per epoch."""

    def __init__(self, source: TaskSource, seed: int) -> None:
        if source.size == 0:
            raise ValueError(f"the {source.split} split has no tasks")
        self._source = source
        self._seed = seed
        self._epoch = -1
        self._order = np.zeros(0, np.int64)

    def index(self, cursor: int) -> int:
        """Index in the source of the task that `cursor` (>= 0) stands for."""
        size = self._source.size
        if size is None:
            return cursor
        epoch, place = divmod(cursor, size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(size)
        return int(self._order[place])

    def task(self, cursor: int) -> Task:
        return self._source.task(self.index(cursor))


def group_id(cursor: int, process: int = 0) -> str:
    """The id of the group with which a rollout process plays the task of `cursor`; sorts like the cursor."""
    return f"group-{cursor:09d}" + (f"-p{process}" if process else "")


def process_of(group: str) -> int:
    """Number of the rollout process that a group is played by."""
    found = re.search(r"-p(\d+)$", group)
    return int(found[1]) if found else 0
