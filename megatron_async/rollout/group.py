"""One group in play: the episodes of one task, whose rewards are compared."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from megatron_async.rollout.environments.base import Task


@dataclass(slots=True)
class Group:
    """A group in play. version: the engines' when it was started. oldest: updates behind the oldest version that may
    have sampled one of its tokens. size: members that are played here. surplus: why it is dropped, when it is.
    failures: why members were given up while the others went on."""

    group_id: str
    task: Task
    version: int
    oldest: int
    size: int
    started: float
    surplus: str = ""
    task_to_cancel: asyncio.Task[None] | None = None
    playing: set[str] = field(default_factory=set)
    finished_lengths: list[int] = field(default_factory=list)
    cut_lengths: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def unfinished(self) -> int:
        """Members that have not finished here."""
        return self.size - len(self.finished_lengths)
