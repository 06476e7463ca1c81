"""What a replay starts from: a copy of the recorded batches in their order, no engines, the recorded run untouched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_async.bank import Bank
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles
from megatron_async.replay import prepare, record
from megatron_async.roster import read_roster
from tests.bank_support import collect_group
from tests.unit.configs import write_config


def recorded(folder: Path, steps: int = 2, **sections: Any) -> Path:
    """A run's folder with so many trained steps, one group that waits and one trajectory that runs."""
    config = yaml.safe_load(write_config(folder, batch={"groups": 1, "group_size": 2}, **sections).read_text())
    run = folder / "runs" / "test"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with Bank.open(f"sqlite:///{run / 'bank.sqlite'}") as bank:
        for step in range(steps):
            collect_group(bank, f"g{step}", version=step)
            assert bank.take_batch(step, 1, 2, 0)
            bank.record_version(step + 1, step, step)
            bank.commit_step(step, step, step + 1)
        collect_group(bank, "waits", version=steps)
    return run


def test_recorded_batches_come_again_in_their_order_and_the_record_stays(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    before = (run / "bank.sqlite").read_bytes()
    config, bank_file = prepare(run, "again", ["optimizer.lr=1e-5", "steps=50"])
    files = RunFiles(config.run_path)
    files.root.mkdir(parents=True)
    record(bank_file, config, files)
    assert (config.name, config.steps, config.optimizer.lr) == ("again", 2, 1e-5)
    assert read_roster(files.root) == []
    with Bank.open(config.bank_url) as bank:
        assert bank.current_version() == 0
        for step in range(2):
            batch = bank.take_batch(step, 1, 2, 99)  # their age is not asked for
            assert batch is not None and [t.trajectory_id for t in batch] == [f"g{step}.0", f"g{step}.1"]
    assert (run / "bank.sqlite").read_bytes() == before


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
