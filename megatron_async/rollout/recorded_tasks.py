"""The tasks of a training record: which a source trains on, and which of an evaluation's are among them.

Invariant: tasks are compared by `identity`, whatever split, mode or file they come from; only digests of that are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_async.config.schema import RunConfig
from megatron_async.credentials import hidden_credentials
from megatron_async.rollout.environments.base import DescribedTaskSource, Task, TaskSource
from megatron_async.training_record import Training

_LISTED = 20_000
"""Tasks up to which a source's tasks are listed: 0.3 MB."""
_DIGITS = 12


def training_on(config: RunConfig, kind: str, source: TaskSource) -> Training:
    """A training of this configuration; source: its training tasks."""
    name = config.environment.name
    with hidden_credentials(config.environment):  # all that is asked here may be the environment's own code
        size = source.size
        about = source.described() if isinstance(source, DescribedTaskSource) else {}
        listed = size is not None and size <= _LISTED
        digests = sorted({_digest(name, source.task(index)) for index in range(size or 0)}) if listed else None
    return Training(kind, config.name, name, about, size, digests)


def compared(trainings: Sequence[Training] | None, environment: str, tasks: TaskSource, count: int) -> dict[str, Any]:
    """JSON for reports: the trainings, and how many of the first `count` tasks are theirs too; {} if none is known."""
    if trainings is None:
        return {}
    count = count if tasks.size is None else min(count, tasks.size)
    known = {digest for item in trainings for digest in item.digests or ()}
    shared = sum(_digest(environment, tasks.task(index)) in known for index in range(count))
    told = [{name: value for name, value in asdict(item).items() if name != "digests"} for item in trainings]
    return {
        "trainings": told,
        "evaluated": count,
        "shared": shared,
        "unlisted": sum(item.digests is None for item in trainings),
    }


def identity(task: Task) -> str:
    """What a task is called wherever it occurs: `data["identity"]` where an environment gives one, else its id."""
    return str(task.data.get("identity", task.task_id))


def _digest(environment: str, task: Task) -> str:
    return hashlib.sha256(f"{environment}\0{identity(task)}".encode()).hexdigest()[:_DIGITS]
