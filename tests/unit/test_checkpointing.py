"""Which folders count as generations, and how far versions lie apart after a resume."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from megatron_async.bank.lineage import Lineage
from megatron_async.config.schema import LayoutConfig
from megatron_async.training import checkpointing
from megatron_async.training.checkpointing import MANIFEST, list_generations, read_generation


def write_generation(folder: Path, steps: int) -> Path:
    """As a save leaves it."""
    aside = folder / f".step_{steps:06d}.abc"
    (aside / "weights").mkdir(parents=True)
    (aside / "weights" / "shard").write_bytes(b"x" * 100)
    manifest = {
        "format": checkpointing.FORMAT, "steps": steps, "version": steps, "optimizer_steps": steps,
        "layout": asdict(LayoutConfig(world_size=2)), "model": {}, "states": {},
    }  # fmt: skip
    path = folder / f"step_{steps:06d}"
    checkpointing.publish_generation(aside, path, manifest)
    return path


def test_generations_are_read_oldest_first(tmp_path: Path) -> None:
    for steps in (20, 5, 100):
        write_generation(tmp_path, steps)
    found = list_generations(tmp_path)
    assert [generation.steps for generation in found] == [5, 20, 100]
    assert found[0].layout == LayoutConfig(world_size=2)
    assert not list(tmp_path.glob(".step_*"))


@pytest.mark.parametrize("damage", ["no manifest", "file missing", "file short", "aside", "other format"])
def test_what_is_not_complete_is_not_there(tmp_path: Path, damage: str) -> None:
    write_generation(tmp_path, 1)
    path = write_generation(tmp_path, 2)
    if damage == "no manifest":
        (path / MANIFEST).unlink()
    elif damage == "file missing":
        (path / "weights" / "shard").unlink()
    elif damage == "file short":
        (path / "weights" / "shard").write_bytes(b"x" * 99)
    elif damage == "aside":
        path.rename(tmp_path / ".step_000002.abc")
    else:
        manifest = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    assert [generation.steps for generation in list_generations(tmp_path)] == [1]


def test_a_generation_of_the_same_steps_is_replaced(tmp_path: Path) -> None:
    first = read_generation(write_generation(tmp_path, 3))
    again = read_generation(write_generation(tmp_path, 3))
    assert first == again
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


def test_pruning_keeps_the_newest_and_counts_complete_ones_only(tmp_path: Path) -> None:
    for steps in (3, 6, 9, 12):
        write_generation(tmp_path, steps)
    (tmp_path / "step_000009" / MANIFEST).unlink()
    assert [generation.steps for generation in checkpointing.prune(tmp_path, 2)] == [6, 12]
    assert [generation.steps for generation in checkpointing.prune(tmp_path, 3)] == [6, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000006", "step_000009", "step_000012"]


def test_gaps_count_updates_not_ids() -> None:
    """Versions 3..5 were lost; the run resumed at 2 and goes on with 6 (its parent is 2) and 7."""
    line = Lineage([(0, None), (1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 2)])
    line.add(7, 6)
    versions = np.array([-1, 0, 2, 3, 4, 5, 6, 7])
    assert line.gaps(7, versions).tolist() == [0, 4, 2, 1, 0, 0, 1, 0]
    assert line.gaps(2, versions).tolist() == [0, 2, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("gap", [0, 1, 5])
def test_without_a_resume_the_bound_is_a_difference_of_ids(gap: int) -> None:
    line = Lineage()
    for version in range(1, 9):
        line.add(version, version - 1)
        assert line.oldest_within(version, gap) == version - gap


def test_without_a_resume_gaps_are_differences_of_ids() -> None:
    line = Lineage()
    for version in range(1, 9):
        line.add(version, version - 1)
    versions = np.arange(9)
    assert (line.gaps(8, versions) == 8 - versions).all()
