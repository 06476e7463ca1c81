"""What `launch` does with a folder that already holds a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async import launch
from megatron_async.config import from_dict
from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError


def configured(tmp_path: Path, steps: int = 3) -> RunConfig:
    return from_dict({"name": "a", "run_dir": str(tmp_path), "steps": steps, "model": {"path": "model"}})


def test_a_run_is_neither_mixed_with_another_nor_lost(tmp_path: Path) -> None:
    files = launch.create_folder(configured(tmp_path), fresh=False)
    (files.root / "bank.sqlite").write_text("trajectories")
    with pytest.raises(UserError, match=r"--resume.*--fresh"):
        launch.create_folder(configured(tmp_path), fresh=False)
    with pytest.raises(UserError, match=r"Pass --fresh"):  # commands that cannot go on with a run
        launch.create_folder(configured(tmp_path), fresh=False, resume=None)
    assert (files.root / "bank.sqlite").exists()


def test_a_resumed_run_keeps_what_it_has_and_takes_the_new_options(tmp_path: Path) -> None:
    files = launch.create_folder(configured(tmp_path), fresh=False)
    (files.root / "bank.sqlite").write_text("trajectories")
    launch.create_folder(configured(tmp_path, steps=9), fresh=False, resume=True)
    assert (files.root / "bank.sqlite").read_text() == "trajectories"
    assert "steps: 9" in files.config.read_text()


def test_resuming_what_is_not_there_begins_it(tmp_path: Path) -> None:
    files = launch.create_folder(configured(tmp_path), fresh=False, resume=True)
    assert files.config.exists()


def test_fresh_and_resume_contradict_each_other(tmp_path: Path) -> None:
    files = launch.create_folder(configured(tmp_path), fresh=False)
    with pytest.raises(UserError, match="choose one"):
        launch.create_folder(configured(tmp_path), fresh=True, resume=True)
    assert files.config.exists()
