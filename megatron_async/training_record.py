"""What a policy was trained on, in a file that travels with its weights.

    trained_on.json    in a run's folder, and in every Hugging Face checkpoint that a run exports

Invariants
- A run writes its record before it trains: what the checkpoint that it begins with has on record, and itself. So a
  warm start on evaluation tasks is not forgotten by what follows it.
- What is not on record is unknown, never denied: without a file nothing is claimed, and what the first recorded
  training began with is unknown.
- Of tasks only digests are kept, and neither paths nor addresses nor credentials are in the file.

How tasks are listed and compared: `rollout.recorded_tasks`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.errors import UserError

if TYPE_CHECKING:  # reports are also written in processes that have none of our packages
    from megatron_async.config.schema import RunConfig

FILE = "trained_on.json"
_FORMAT = 1
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


def unlisted(config: RunConfig, kind: str) -> Training:
    """A training of this configuration whose tasks cannot be asked for."""
    return Training(kind, config.name, config.environment.name)


def begin(config: RunConfig, training: Training) -> None:
    """Write the record of a run that is to train: first what its checkpoint has, and, where a run goes on, what it has
    been trained on already. Raises UserError for a record that is damaged."""
    earlier = [*(read(Path(config.model.path)) or ()), *(read(config.run_path) or ())]
    write(config.run_path, [*earlier, training])


def begin_if_missing(config: RunConfig, kind: str) -> None:
    """For ranks that were started without `launch` or `sft`: a record without a list of tasks, if there is none."""
    if not (config.run_path / FILE).exists():
        begin(config, unlisted(config, kind))


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


def describe(known: Mapping[str, Any]) -> str:
    """A sentence or two for people. known: as of `rollout.recorded_tasks.compared`."""
    if not known:
        return "Unknown what it was trained on."
    told = "; then ".join(_described(item) for item in known["trainings"])
    shared = f"{known['shared']} of the {known['evaluated']} evaluated tasks are among those listed on its record"
    if known["unlisted"] == len(known["trainings"]):
        shared = "its record lists no tasks to compare with"
    elif known["unlisted"]:
        shared += f", which lists none for {known['unlisted']} of these trainings"
    return f"Trained, by its record: {told}; {shared}. What came before that is unknown."


def _described(item: Mapping[str, Any]) -> str:
    about = [f"{name.replace('_', ' ')} {_listed(item['about'][name])}" for name in _SHOWN if item["about"].get(name)]
    count = "tasks not counted" if item["tasks"] is None else f"{item['tasks']} tasks"
    return f"{item['kind']} on {', '.join([item['environment'], *about])} ({count})"


def _listed(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
