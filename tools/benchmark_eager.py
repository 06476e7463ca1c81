"""How much of the old log-prob stage is hidden in the trainer's waiting, on the live system.

    python -m tools.benchmark_eager --model runs/quickstart_warm_start/checkpoint [--write]

Two runs of the main job from the same policy. One anchors on the starting weights and scores every batch by a forward
of its own; the other restores the versions of the batch's tokens and scores what it can while it waits for the batch
(`snapshots.eager`). On a machine where generation is the bottleneck, the figures are the share of the needed log-probs
that were scored while waiting [eager_share], and the stage at batch time against the first run's [eager_stage_ratio].
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_async.config import load, save
from megatron_async.errors import UserError
from megatron_async.observe import read_metrics
from tools.benchmark_rows import ROOT, Row, write_rows

RUNS: dict[str, dict[str, object]] = {
    "start": {"objective.anchor": "start", "old_logits.reuse_training_forward": "false"},
    "eager": {"objective.anchor": "snapshot"},
}
Metrics = list[dict[str, Any]]
SKIPPED = 3
"""First steps, in which engines and batches still settle."""


def run(name: str, changes: dict[str, object], arguments: argparse.Namespace) -> tuple[Path, Metrics]:
    """Folder of one run of the main job, and metrics of its steps. Raises UserError when it fails."""
    overrides = {
        "name": name,
        "run_dir": str(arguments.folder),
        "model.path": str(arguments.model),
        "steps": arguments.steps,
        "evaluation.tasks": 4,
        "observe.tensorboard": "false",
        "observe.progress": "plain",
        **changes,
    }
    config = load(arguments.config, [f"{key}={value}" for key, value in overrides.items()])
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / f"{name}.yaml"
    save(config, file)
    command = [sys.executable, "-m", "megatron_async", "launch", "--fresh", "--config", str(file)]
    print(f"{name}: {' '.join(command)}", flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the run {name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return config.run_path, read_metrics(config.run_path)[SKIPPED:]


def median(rows: Metrics, metric: str) -> float:
    return statistics.median(row[metric] for row in rows if metric in row)


def shares(rows: Metrics) -> tuple[float, float]:
    """Share of the run's needed log-probs that was scored while waiting; and of the action tokens that needed one."""
    ahead = needed = tokens = 0.0
    for row in rows:
        actions = row["batch/trained_action_tokens"]
        stale = sum(
            count
            for name, count in row.items()
            if name.startswith("version_gap/tokens/") and name[-2:] != "/0"
        )
        ahead += row["old_logits/ahead/share"] * actions
        needed += stale
        tokens += actions
    return ahead / max(needed, 1.0), needed / max(tokens, 1.0)


def rows_of(start: Metrics, eager: Metrics, arguments: argparse.Namespace) -> list[Row]:
    """The figures."""
    share, needed = shares(eager)
    stages = median(start, "seconds/old_logits"), median(eager, "seconds/old_logits")
    conditions = (
        f"desk, tiny Qwen3-MoE, {arguments.steps} steps; {needed:.0%} of the action tokens are older than the trainer; "
        f"stage {stages[1]:.3f} s against a forward of {stages[0]:.3f} s, of a step of "
        f"{median(eager, 'seconds/step'):.2f} s, {median(eager, 'seconds/wait_batch'):.2f} s of it waiting"
    )
    return [
        Row("eager_share", round(share, 3), "", ">= 0.8", conditions),
        Row("eager_stage_ratio", round(stages[1] / stages[0], 3), "", "<= 0.5", conditions),
    ]


def parser_of(description: str | None, folder: str) -> argparse.ArgumentParser:
    """What measurements of the live system ask for."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(ROOT / "recipes/configs/quickstart.yaml"))
    parser.add_argument("--model", type=Path, default=ROOT / "runs/quickstart_warm_start/checkpoint")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / folder)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks")
    return parser


def main() -> int:
    arguments = parser_of(__doc__, "eager").parse_args()
    start, eager = (run(name, changes, arguments)[1] for name, changes in RUNS.items())
    made = rows_of(start, eager, arguments)
    for row in made:
        print(f"{row.figure} {row.value} ({row.goal}): {row.conditions}")
    if arguments.write:
        write_rows("snapshot", made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
