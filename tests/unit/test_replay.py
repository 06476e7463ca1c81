"""What a replay starts from: a copy of the recorded batches in their order, no engines, the recorded run untouched."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy.exc import DBAPIError

from megatron_async.bank import Bank, BankOpenError
from megatron_async.bank.dialects import LOCK_TIMEOUT_S
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles
from megatron_async.replay import prepare, record
from megatron_async.roster import read_roster
from megatron_async.trajectory import Trajectory
from tests.bank_support import check_consistent, close_view, collect_group, running
from tests.unit.configs import write_config


def recorded(folder: Path, steps: int = 2, url: str = "", **sections: Any) -> Path:
    """A run's folder with so many trained steps, one group that waits and one trajectory that runs."""
    sections = {"batch": {"groups": 1, "group_size": 2}, "bank": {"url": url}, **sections}
    config = yaml.safe_load(write_config(folder, **sections).read_text())
    run = folder / "runs" / "test"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with Bank.open(url or f"sqlite:///{run / 'bank.sqlite'}") as bank:
        for step in range(steps):
            collect_group(bank, f"g{step}", version=step)
            assert bank.take_batch(step, 1, 2, 0)
            bank.record_version(step + 1, step, step)
            bank.commit_step(step, step, step + 1)
        collect_group(bank, "waits", version=steps)
    return run


def test_recorded_batches_come_again_in_their_order_and_the_record_stays(
    tmp_path: Path, bank_url: str
) -> None:
    run = recorded(tmp_path, url=bank_url)
    with Bank.open(bank_url) as bank:
        bank.start_trajectory(running("late", "late"))
        before = bank.counts(), bank.steps(), bank.versions()
    config, recorded_bank = prepare(run, "again", ["optimizer.lr=1e-5", "steps=50"])
    files = RunFiles(config.run_path)
    files.root.mkdir(parents=True)
    record(recorded_bank, config, files)
    assert (config.name, config.steps, config.optimizer.lr) == ("again", 2, 1e-5)
    assert read_roster(files.root) == []
    with Bank.open(config.bank_url) as bank:
        assert bank.current_version() == 0
        for step in range(2):
            batch = bank.take_batch(step, 1, 2, 99)  # their age is not asked for
            assert batch is not None and [t.trajectory_id for t in batch] == [f"g{step}.0", f"g{step}.1"]
        collect_group(bank, "new")
        assert ids(bank.take_batch(2, 1, 2, 0)) == ["waits.0", "waits.1"]
        assert ids(bank.take_batch(3, 1, 2, 0)) == ["new.0", "new.1"]
    check_consistent(config.bank_url)
    close_view(config.bank_url)
    with Bank.open_to_read(bank_url) as bank:
        assert (bank.counts(), bank.steps(), bank.versions()) == before


def ids(batch: list[Trajectory] | None) -> list[str]:
    assert batch is not None
    return [trajectory.trajectory_id for trajectory in batch]


def test_a_recorded_bank_is_only_read_also_while_somebody_writes(tmp_path: Path) -> None:
    """The recorded run may be at work: nobody waits for its lock, and the file does not change."""
    run = recorded(tmp_path)
    file = run / "bank.sqlite"
    before = file.read_bytes()
    with closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        config, url = prepare(run, "again", [])
        RunFiles(config.run_path).root.mkdir(parents=True)
        record(url, config, RunFiles(config.run_path))
        assert time.monotonic() - started < LOCK_TIMEOUT_S / 2
        writer.execute("ROLLBACK")
    assert file.read_bytes() == before


def test_what_was_opened_to_read_cannot_be_written(bank_url: str) -> None:
    with pytest.raises(BankOpenError, match="cannot read the bank"):
        Bank.open_to_read(bank_url)
    Bank.open(bank_url).close()
    with Bank.open_to_read(bank_url) as bank, pytest.raises(DBAPIError, match="read.?only"):
        bank.set_state("phase", "finished")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["name=test"], "the recorded run itself"),
        (["batch.groups=2"], "replayed as they are"),
        (["objective.anchor=snapshot"], "only the recorded run had"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    run = recorded(tmp_path)
    with pytest.raises(UserError, match=message):
        prepare(run, "test" if "name=test" in overrides else "again", overrides)


def test_a_run_whose_tokens_were_discarded_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    with Bank.open(f"sqlite:///{run / 'bank.sqlite'}") as bank:
        bank.discard_payloads(through_step=0)
    with pytest.raises(UserError, match="steps up to 0 were deleted.* needs bank.keep=all"):
        prepare(run, "again", [])


def test_a_run_without_a_trained_step_has_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="recorded no training step"):
        prepare(recorded(tmp_path, steps=0), "again", [])
