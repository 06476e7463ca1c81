"""Measures the quickstart as a user meets it: set-up, then the whole job on several seeds.

    python tools/benchmark_quickstart.py --seeds 0 1 2 [--set KEY=VALUE ...]

Figures in docs/benchmarks/quickstart.json: setup_minutes (a fresh environment), total_minutes (set-up plus the longest
run), gain_points_min (held-out success after RL minus warm start, smallest of the seeds), version_gap_mean, and the
timeline of one step as a picture. Resumable: a seed that has finished under the same settings is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_async.observe.report import Report
from tools.benchmark_rows import ROOT, Row, commit, write_rows

FOLDER = ROOT / "runs" / "benchmark_quickstart"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--skip-setup", action="store_true", help="keep the set-up time measured before")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    setup = _remembered("setup", {}, measure_setup, keep=arguments.skip_setup)
    settings = {"overrides": arguments.overrides}
    runs = [
        _remembered(f"seed_{seed}", settings, lambda seed=seed: measure_run(seed, arguments.overrides), keep=True)
        for seed in arguments.seeds
    ]
    timeline = ROOT / "runs" / f"benchmark_seed{arguments.seeds[0]}" / "timeline.png"
    shutil.copy(timeline, ROOT / "docs" / "benchmarks" / "quickstart_timeline.png")
    write_rows("quickstart", rows(setup, arguments.seeds, runs))


def _remembered(name: str, settings: dict[str, Any], measure: Any, *, keep: bool) -> dict[str, Any]:
    """The result kept in FOLDER under the same settings, or a new measurement."""
    path = FOLDER / f"{name}.json"
    if keep and path.exists():
        kept: dict[str, Any] = json.loads(path.read_text())
        if kept["settings"] == settings:
            return kept
    result = {"settings": settings, "commit": commit(), **measure()}
    path.write_text(json.dumps(result, indent=1))
    return result


def measure_setup() -> dict[str, Any]:
    """Seconds that set-up takes where there is no environment yet."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        subprocess.run(
            ["bash", "recipes/setup.sh"], cwd=ROOT, check=True, env={**os.environ, "VENV": f"{folder}/venv"}
        )
        return {"seconds": time.monotonic() - started}


def measure_run(seed: int, overrides: list[str]) -> dict[str, Any]:
    """One whole quickstart from the model to the report, on a seed of its own."""
    name = f"benchmark_seed{seed}"
    for suffix in ("", "_model", "_warm_start"):
        shutil.rmtree(ROOT / "runs" / (name + suffix), ignore_errors=True)
    command = ["bash", "recipes/quickstart.sh", "--set", "observe.progress=plain"]
    for override in overrides:
        command += ["--set", override]
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NAME": name, "SEED": str(seed)})
    seconds = time.monotonic() - started
    return {"seconds": seconds, **outcome(ROOT / "runs" / name)}


def outcome(run: Path) -> dict[str, Any]:
    """What the run's folder says."""
    report = Report.from_folder(run)
    if len(report.evaluations) < 2:
        raise RuntimeError(f"{run} has no evaluations before and after; see its logs")
    before, after = report.evaluations[0], report.evaluations[-1]
    return {
        "before": before["success_rate"],
        "after": after["success_rate"],
        "stderr": [before["stderr"], after["stderr"]],
        "gain_points": report.gain_points,
        "version_gap_mean": report.version_gap_mean,
        "histogram": report.version_gap_histogram,
        "stages": report.seconds_by_stage,
    }


def rows(setup: dict[str, Any], seeds: list[int], runs: list[dict[str, Any]]) -> list[Row]:
    """The figures, with what each seed gave in their conditions."""
    each = "; ".join(
        f"seed {seed}: {100 * run['before']:.1f} % -> {100 * run['after']:.1f} % in {run['seconds'] / 60:.1f} min "
        f"(commit {run['commit']})"
        for seed, run in zip(seeds, runs, strict=True)
    )
    longest = max(run["seconds"] for run in runs)
    histogram = runs[0]["histogram"]
    setup_minutes = setup["seconds"] / 60
    return [
        Row("setup_minutes", round(setup_minutes, 2), "min", "<= 4", "fresh environment, packages downloaded"),
        Row("total_minutes", round(setup_minutes + longest / 60, 2), "min", "<= 20",
            f"set-up, model, warm start, RL and evaluations; longest of the seeds; {each}"),
        Row("gain_points_min", round(min(run["gain_points"] for run in runs), 1), "points", ">= 20", each),
        Row("version_gap_mean", round(sum(run["version_gap_mean"] for run in runs) / len(runs), 3), "versions", "> 0",
            f"trained action tokens by gap, first seed: {histogram}"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
