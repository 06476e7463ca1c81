"""What a policy was trained on, in a file that travels with its weights.

    trained_on.json    in a run's folder, and in every Hugging Face checkpoint that a run exports

Invariants
- A run writes its record before it trains: what the checkpoint that it begins with has on record, and itself. So a
  warm start on evaluation tasks is not forgotten by what follows it.
- What is not on record is unknown, never denied: without a file nothing is claimed, and what the first recorded
  training began with is unknown.
- Tasks are compared by `identity`, whatever split, mode or file they come from; only digests of that are kept. Neither
  paths nor addresses nor credentials are in the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.errors import UserError
from megatron_async.rollout.environments.base import DescribedTaskSource, Task, TaskSource

if TYPE_CHECKING:  # reports are also written in processes that have none of our packages
    from megatron_async.config.schema import RunConfig
from megatron_async.credentials import hidden_credentials

FILE = "trained_on.json"
_FORMAT = 1
_LISTED = 20_000
"""Tasks up to which a source's tasks are listed: 0.3 MB."""
_DIGITS = 12
REINFORCED = "reinforcement learning"
WARM_START = "warm start"
_SHOWN = ("domain", "category", "split", "exclude_splits")
"""What of a description stands in a line for people."""


@dataclass(frozen=True, slots=True)
class Training:
    """One training: its kind, its run's name, and the tasks that it drew from.

    environment, about: their source, in the source's own words (`DescribedTaskSource`). tasks: how many; None where
    they are endless or nobody has counted them. digests: of each task; None where they are not listed.
    """

    kind: str
    run: str
    environment: str
    about: dict[str, Any] = field(default_factory=dict)
    tasks: int | None = None
    digests: list[str] | None = None


def training(config: RunConfig, kind: str, source: TaskSource | None) -> Training:
    """A training of this configuration; source: its training tasks, None where they cannot be asked."""
    name = config.environment.name
    if source is None:
        return Training(kind, config.name, name)
    with hidden_credentials(config.environment):  # all that is asked here may be the environment's own code
        size = source.size
        about = source.described() if isinstance(source, DescribedTaskSource) else {}
        listed = size is not None and size <= _LISTED
        digests = sorted({_digest(name, source.task(index)) for index in range(size or 0)}) if listed else None
    return Training(kind, config.name, name, about, size, digests)


def begin(config: RunConfig, kind: str, source: TaskSource | None) -> None:
    """Write the record of a run that is to train: first what its checkpoint has, and, where a run goes on, what it has
    been trained on already. Raises UserError for a record that is damaged."""
    earlier = [*(read(Path(config.model.path)) or ()), *(read(config.run_path) or ())]
    write(config.run_path, [*earlier, training(config, kind, source)])


def begin_if_missing(config: RunConfig, kind: str) -> None:
    """For ranks that were started without `launch` or `sft`: a record without a list of tasks, if there is none."""
    if not (config.run_path / FILE).exists():
        begin(config, kind, None)


def write(folder: Path, trainings: Sequence[Training]) -> None:
    """Put a record into a folder; of equal trainings the first one stays."""
    unique = [item for index, item in enumerate(trainings) if item not in trainings[:index]]
    written = json.dumps({"format": _FORMAT, "trained_on": [asdict(item) for item in unique]}, indent=1)
    part = folder / f"{FILE}.part"
    part.write_text(written, encoding="utf-8")
    os.replace(part, folder / FILE)


def read(folder: Path) -> list[Training] | None:
    """The record in the folder of a checkpoint or a run, None where there is none. UserError for a damaged one."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != _FORMAT:
            raise ValueError(f"format {values['format']}, this release knows {_FORMAT}")
        return [Training(**item) for item in values["trained_on"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no record of what the weights were trained on ({error!r}): put back the one that was written "
            "with them, or delete it if you take them as weights of which nothing is known"
        ) from error


def carry(run: Path, checkpoint: Path) -> None:
    """Put a run's record beside the weights that it exported; nothing where it has none."""
    if (run / FILE).is_file():
        shutil.copyfile(run / FILE, checkpoint / FILE)


def of_engines(model: Path, run: Path | None, versions: Sequence[int]) -> list[Training] | None:
    """The record of what engines hold; None if nothing is known.

    model: the checkpoint that they began with. run: whose trainer publishes to them, if any. versions: that they hold;
    version 0 is that checkpoint.
    """
    return read(run) if run is not None and any(versions) else read(model)


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


def describe(known: Mapping[str, Any]) -> str:
    """A sentence or two for people. known: as of `compared`."""
    if not known:
        return "Unknown what it was trained on."
    told = "; then ".join(_described(item) for item in known["trainings"])
    shared = f"{known['shared']} of the {known['evaluated']} evaluated tasks are among those listed on its record"
    if known["unlisted"] == len(known["trainings"]):
        shared = "its record lists no tasks to compare with"
    elif known["unlisted"]:
        shared += f", which lists none for {known['unlisted']} of these trainings"
    return f"Trained, by its record: {told}; {shared}. What came before that is unknown."


def identity(task: Task) -> str:
    """What a task is called wherever it occurs: `data["identity"]` where an environment gives one, else its id."""
    return str(task.data.get("identity", task.task_id))


def _described(item: Mapping[str, Any]) -> str:
    about = [f"{name.replace('_', ' ')} {_listed(item['about'][name])}" for name in _SHOWN if item["about"].get(name)]
    count = "tasks not counted" if item["tasks"] is None else f"{item['tasks']} tasks"
    return f"{item['kind']} on {', '.join([item['environment'], *about])} ({count})"


def _listed(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _digest(environment: str, task: Task) -> str:
    return hashlib.sha256(f"{environment}\0{identity(task)}".encode()).hexdigest()[:_DIGITS]
