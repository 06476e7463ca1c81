"""The SAO job on a CPU: a critic learns values from the warm-started policy's run; the job starts with that critic."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Stands for Python: writes down its arguments, and leaves the files by which the recipe knows what is done.
RECORDER = """#!/usr/bin/env bash
echo "$@" >> record
for word in "$@"; do
  case "$word" in
    name=*_warm_start) mkdir -p "runs/${word#name=}/checkpoint"; touch "runs/${word#name=}/checkpoint/config.json" ;;
    name=*) mkdir -p "runs/${word#name=}/critic"; touch "runs/${word#name=}/critic/config.json" ;;
  esac
done
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    recipes, python = tmp_path / "recipes", tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(RECORDER)
    python.chmod(0o755)
    recipes.mkdir()
    (recipes / "setup.sh").write_text("exit 0\n")
    (recipes / "sao_desk.sh").write_text((ROOT / "recipes/sao_desk.sh").read_text())
    (recipes / "configs").symlink_to(ROOT / "recipes/configs")
    return tmp_path


def commands(site: Path, **variables: str) -> list[str]:
    """What one call of the recipe runs."""
    (site / "record").unlink(missing_ok=True)
    environment = {"PATH": os.environ["PATH"], "VENV": str(site / "venv"), **variables}
    subprocess.run(["bash", str(site / "recipes/sao_desk.sh"), "--set", "steps=3"], env=environment, check=True)
    return (site / "record").read_text().splitlines()


def test_the_job_starts_with_the_critic_that_was_pretrained(site: Path) -> None:
    first = commands(site)
    kinds = ["make_tiny", "sft", "launch", "pretrain-critic", "launch"]
    assert [kind in command for kind, command in zip(kinds, first, strict=True)] == [True] * 5
    assert "name=sao_desk_seed0_recorded " in first[2]
    assert "name=sao_desk_seed0_recorded_values " in first[3]
    assert "critic.pretrain_runs=[runs/sao_desk_seed0_recorded]" in first[3]
    # Not the recording run's own critic, which every run with a critic leaves in its folder too.
    assert first[4].endswith("--set critic.path=runs/sao_desk_seed0_recorded_values/critic --set steps=3")
    assert commands(site) == first[4:], "warm start, recorded run and values are kept"


def test_an_interrupted_pretraining_is_made_again(site: Path) -> None:
    last = commands(site)[4]
    (site / "runs/sao_desk_seed0_recorded_values/critic/config.json").unlink()
    again = commands(site)
    assert "pretrain-critic" in again[1] and again[2] == last


@pytest.mark.parametrize(("name", "value"), [("PRETRAIN_STEPS", "0"), ("CONFIG", "recipes/configs/sao/grpo_dis.yaml")])
def test_nothing_is_pretrained_where_no_critic_needs_it(site: Path, name: str, value: str) -> None:
    assert not any("pretrain" in command or "critic.path" in command for command in commands(site, **{name: value}))
