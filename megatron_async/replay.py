"""`megatron-async replay`: train on the batches that another run recorded, with neither engines nor a rollout.

Every run records its batches: they are in its bank, by step. A replay is a run of its own with a copy of that bank,
whose trainer takes the recorded batches in their order, as a trainer does that catches up after a kill; nobody is
published to. Invariants: the recorded run is only read, also while it goes on; on a deterministic platform two replays
with the same options end with the same bits.

What it is for: to try an objective, an advantage, a learning rate or a layout on equal data, and to look for a defect
of the trainer without waiting for agents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from megatron_async import config as configuration
from megatron_async import training_record
from megatron_async.bank import Bank
from megatron_async.bank.requests import PHASE, RESUMING
from megatron_async.config import load
from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from megatron_async.launch import train_alone
from megatron_async.observe import RunFiles
from megatron_async.roster import write_roster

_SQLITE = "sqlite:///"
_NEEDS_HISTORY = ("snapshot", "snapshot_full", "dedicated", "interrupt")


def run(recorded: Path, name: str, overrides: Sequence[str], *, fresh: bool = False) -> int:
    """Replay the run in the folder `recorded` as a run called `name`; returns the exit code.

    overrides: options that differ from the recorded run's, as KEY=VALUE. Raises UserError for what cannot be replayed.
    """
    config, source = prepare(recorded, name, overrides)

    def fill(files: RunFiles) -> None:
        record(source, config, files)
        record_training(recorded, config)

    return train_alone(config, fill, fresh=fresh)


def prepare(recorded: Path, name: str, overrides: Sequence[str]) -> tuple[RunConfig, str]:
    """(configuration of the replay, URL of the recorded run's bank). Raises UserError."""
    files = RunFiles(recorded)
    if not files.config.is_file():
        raise UserError(
            f"{recorded} is not the folder of a run (it has no config.yaml); give one such as runs/quickstart"
        )
    before = load(str(files.config), [])
    config = load(str(files.config), [*overrides, f"name={name}", "bank.url=''"])
    url = _recorded_bank(before.bank_url, recorded)
    if config.run_path.resolve() == recorded.resolve():
        raise UserError(f"--name {name}: that is the recorded run itself; choose another name")
    source = config.old_logits.source
    if source in _NEEDS_HISTORY:
        raise UserError(
            f"objective.anchor: {config.objective.anchor} scores tokens under the weights that sampled them, which "
            "only the recorded run had; replay with --set objective.anchor=start or rollout"
        )
    if (config.batch.groups, config.batch.group_size) != (before.batch.groups, before.batch.group_size):
        raise UserError(
            "batch: recorded batches are replayed as they are; leave batch.groups and batch.group_size alone"
        )
    with Bank.open_to_read(url) as read:
        steps = sum(step.state in ("committed", "redo") for step in read.steps())
        gone = read.discarded_through()
    if gone >= 0:
        raise UserError(
            f"{recorded}: the tokens of its steps up to {gone} were deleted, since newer checkpoints hold what they "
            "taught (bank.keep); a run that is to be replayed needs bank.keep=all from its start"
        )
    if not steps:
        raise UserError(f"{recorded} has recorded no training step yet")
    return dataclasses.replace(config, steps=min(config.steps, steps)), url


def record_training(recorded: Path, config: RunConfig) -> None:
    """Write what a replay trains on: what the recorded run did, from the checkpoint that the replay begins with.

    Raises UserError for a record that is damaged.
    """
    known = training_record.read(recorded)
    if known is None:  # of an earlier release
        training_record.begin(config, training_record.unlisted(config, training_record.REINFORCED))
        return
    earlier = training_record.read(Path(config.model.path)) or []
    training_record.write(config.run_path, [*earlier, *known])


def _recorded_bank(url: str, recorded: Path) -> str:
    if not url.startswith(_SQLITE):
        return url
    bank = Path(url.removeprefix(_SQLITE))
    bank = bank if bank.is_file() else recorded / bank.name  # the folder may have been moved
    if not bank.is_file():
        raise UserError(f"{recorded}: its bank {bank} is not there")
    return f"{_SQLITE}{bank}"


def record(bank_url: str, config: RunConfig, files: RunFiles) -> None:
    """Fill the replay's folder: a copy of the bank at rest before its first step, and no engines."""
    copy = files.root / "bank.sqlite"
    with Bank.open_to_read(bank_url) as source:
        source.copy_to(copy)
    with Bank.open(f"{_SQLITE}{copy}") as taken:
        taken.abandon_running("not part of the replay")
        taken.rollback_uncommitted(-1)
        taken.set_current_version(0)
        taken.set_state(PHASE, RESUMING)
    write_roster(files.root, [])
    configuration.save(config, files.config)
