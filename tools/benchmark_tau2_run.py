"""The whole tau2 job on a CPU: recipes/tau2_telecom_cpu.sh timed, and the official evaluator before and after.

telecom_cpu_minutes      the recipe's wall time, set-up excluded
telecom_cpu_{train,test} success on the tasks of each split [after the warm start, after RL], official evaluator
telecom_cpu_gain_*       the difference, in points; a gain is more than one standard error of it

A tiny model with a compact prompt in solo mode: no leaderboard numbers.

    python -m tools.benchmark_tau2_run --write
    python -m tools.benchmark_tau2_run --samples 2 --write                       # episodes per task
    python -m tools.benchmark_tau2_run --run-dir runs --minutes 21.5 --write     # of a run that is there
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.benchmark_rows import ROOT, Row, write_rows

NAME = "tau2_telecom_cpu"
LABELS = ("before", "after")
SPLITS = {"train": 74, "test": 40}
SAMPLES = 4
"""The recipe's own."""


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="tau2-run-") as scratch:
        folder = args.run_dir or Path(scratch)
        minutes = args.minutes if args.run_dir else run(folder, args.samples)
        made = rows(folder, minutes)
    for row in made:
        print(f"{row.figure}: {row.value} {row.unit} (goal {row.goal or 'none'}) {row.conditions}")
    if args.write:
        write_rows("tau2", made)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path, help="a folder that the recipe has filled; runs nothing")
    parser.add_argument("--minutes", type=float, default=math.nan, help="what that took")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help="episodes per task in the official evaluations (SAMPLES)"
    )
    parser.add_argument("--write", action="store_true", help="keep the figures in docs/benchmarks/tau2.json")
    args = parser.parse_args()
    if args.run_dir and math.isnan(args.minutes):
        parser.error("--run-dir needs --minutes: how long the recipe took")
    return args


def run(folder: Path, samples: int) -> float:
    """Run the recipe into `folder`, `samples` official episodes per task; returns its minutes."""
    environment = {**os.environ, "RUN_DIR": str(folder), "NAME": NAME, "SAMPLES": str(samples)}
    subprocess.run(["bash", "recipes/setup.sh"], cwd=ROOT, check=True)
    started = time.monotonic()
    command = ["bash", f"recipes/{NAME}.sh", "--set", "observe.progress=plain"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return (time.monotonic() - started) / 60


def rows(folder: Path, minutes: float) -> list[Row]:
    """The rows of a run that the recipe has made. ValueError when its evaluations differ in episodes per task."""
    steps = len((folder / NAME / "metrics.jsonl").read_text().splitlines())
    job = f"tiny Qwen3-MoE, telecom solo, compact prompt (no leaderboard number), {steps} RL steps"
    again = _command(folder)
    made = [
        Row("telecom_cpu_minutes", round(minutes, 1), "min", "<= 60", f"{job}; set-up excluded", again)
    ]
    for split, tasks in SPLITS.items():
        before, after = (evaluation(folder, label, split) for label in LABELS)
        assert before["tasks"] == after["tasks"] == tasks, f"{split}: not all tasks were counted"
        errors = [100 * result["stderr"] for result in (before, after)]
        benchmark, samples = after["benchmark"], after["samples_per_task"]
        conditions = (
            f"{job}; {benchmark['benchmark']}, split {split}, {tasks} tasks, {samples} episodes each, official "
            f"evaluator, after the warm start and after RL; standard error {errors[0]:.1f}, {errors[1]:.1f} points; "
            f"doing nothing {100 * benchmark['floor']:.0f} %"
        )
        error = math.hypot(*errors)  # of the difference, the two taken as independent
        gain = 100 * (after["success_rate"] - before["success_rate"])
        goal = f"more than one standard error of the difference ({error:.1f})"
        success = [round(100 * result["success_rate"], 1) for result in (before, after)]
        made.append(Row(f"telecom_cpu_{split}", success, "%", "", conditions, again))
        figure = f"telecom_cpu_gain_{split}"
        made.append(Row(figure, round(gain, 1), "points", goal, conditions, again, passed=gain > error))
    return made


def _command(folder: Path) -> str:
    """What plays a run like this one again, also when these rows were made of a run that was there."""
    samples = {evaluation(folder, label, split)["samples_per_task"] for label in LABELS for split in SPLITS}
    if len(samples) > 1:
        raise ValueError(
            f"{folder}: the official evaluations have {sorted(samples)} episodes per task; play them with one SAMPLES"
        )
    return f"python -m tools.benchmark_tau2_run --samples {samples.pop()} --write"


def evaluation(folder: Path, label: str, split: str) -> dict[str, Any]:
    """What the recipe's official evaluation wrote."""
    path = folder / f"{NAME}_official" / f"{label}_{split}" / "evaluation.json"
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["benchmark"]["split"] == split
    return result


if __name__ == "__main__":
    main()
