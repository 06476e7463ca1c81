"""How the discrepancy ratio and the mask behave as tokens get older, by anchor, on the live system.

The falsifiable prediction of arXiv 2605.12070: with a mask of one per cent on old/rollout, tokens are rejected the more
the older they are where the anchor is not exact, since the policy's drift enters the ratio; with an exact anchor the
ratio is engine noise whatever the age, and nothing is rejected.

    python -m tools.lag_experiment --model runs/quickstart_warm_start/checkpoint [--write]

One run of the main job per anchor, with publishing held back: engines get every `--lag`-th version, so the gap climbs
from 0 to `--lag` - 1 and falls back, several times in a run. Figures are taken by version gap from the runs' metrics,
means over tokens. A finished run is one row in runs/lag/rows.jsonl and is not made again under the same configuration.
(tools/sweep.py compares whole runs of several methods; here the axis is the age of a token inside one run.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async.config import RunConfig, dump, load
from megatron_async.errors import UserError
from megatron_async.objectives.statistics import GAPS, PREFIX
from megatron_async.observe import read_metrics
from megatron_async.observe.rows import RowWriter, read_rows
from tools.benchmark_rows import FOLDER, ROOT, Row, write_rows

ANCHORS = ("start", "ewma", "linear", "loglinear", "snapshot")
MEASURES = {
    "log_discrepancy": f"{PREFIX}log_discrepancy/mean_abs",
    "log_staleness": f"{PREFIX}log_staleness/mean_abs",
    "masked": f"{PREFIX}masked",
    "active": f"{PREFIX}active",
}
NOISE_GROWTH, MASK_PASS = 2.0, 0.99

ByGap = dict[int, dict[str, float]]


def configuration(anchor: str, arguments: argparse.Namespace) -> RunConfig:
    """The run of one anchor: the quickstart with the paper's thresholds, and publishing held back."""
    overrides = {
        "name": anchor,
        "run_dir": str(arguments.folder),
        "model.path": str(arguments.model),
        "steps": arguments.steps,
        "seed": arguments.seed,
        "optimizer.lr": arguments.lr,
        "objective.anchor": anchor,
        "objective.mask_low": 0.990,
        "objective.mask_high": 1.010,
        "objective.clip_low": 0.003,
        "objective.clip_high": 0.004,
        "batch.groups": arguments.groups,
        "rollout.max_staleness": arguments.lag - 1,
        "publish.every": arguments.lag,
        "evaluation.tasks": 4,
        "observe.tensorboard": "false",
        "observe.progress": "plain",
    }
    return load(arguments.config, [f"{key}={value}" for key, value in overrides.items()])


def identity(config: RunConfig) -> str:
    """Digest of the resolved configuration: any changed option is another run."""
    return hashlib.sha256(dump(config).encode()).hexdigest()[:16]


def by_gap(metrics: list[dict[str, Any]]) -> ByGap:
    """gap → measure → mean over all tokens of that gap in the run; the last gap takes every larger one."""
    found: ByGap = {}
    for gap in range(GAPS):
        label = f"gap_{gap}+" if gap == GAPS - 1 else f"gap_{gap}"
        rows = [row for row in metrics if row.get(f"{PREFIX}tokens/{label}")]
        tokens = [row[f"{PREFIX}tokens/{label}"] for row in rows]
        if not rows:
            continue
        found[gap] = {"tokens": sum(tokens)}
        for name, metric in MEASURES.items():
            values = [row[f"{metric}/{label}"] for row in rows]
            found[gap][name] = sum(v * n for v, n in zip(values, tokens, strict=True)) / sum(tokens)
    return found


def run(anchor: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of one anchor; from an earlier call where there is one. Raises UserError when the run fails."""
    config, path = configuration(anchor, arguments), arguments.folder / "rows.jsonl"
    known = {row["identity"]: row for row in read_rows(path)}
    key = identity(config)
    if key in known:
        return known[key]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / f"{anchor}.yaml"
    file.write_text(dump(config))
    command = [sys.executable, "-m", "megatron_async", "launch", "--fresh", "--config", str(file)]
    print(f"{anchor}: {' '.join(command)}", flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the run of anchor {anchor} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    row = {"identity": key, "anchor": anchor, "gaps": by_gap(read_metrics(config.run_path))}
    with RowWriter(path) as rows:
        rows.append(row)
    return json.loads(json.dumps(row))


def gaps_of(row: Mapping[str, Any]) -> ByGap:
    return {int(gap): values for gap, values in row["gaps"].items()}


def table(found: Mapping[str, ByGap]) -> str:
    """Markdown: share passing the mask, and mean |log r_d|, by anchor and gap."""
    gaps = sorted({gap for values in found.values() for gap in values})
    lines = ["| anchor | figure | " + " | ".join(f"gap {gap}" for gap in gaps) + " |"]
    lines.append("|---|---|" + "---|" * len(gaps))
    for anchor, values in found.items():
        for title, cell in (
            ("passes the mask", lambda v: f"{1 - v['masked']:.3f}"),
            ("ρ (mask and clip)", lambda v: f"{v['active']:.3f}"),
            ("mean abs log r_d", lambda v: f"{v['log_discrepancy']:.1e}"),
        ):
            cells = [cell(values[gap]) if gap in values else "–" for gap in gaps]
            lines.append(f"| {anchor} | {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rows(found: Mapping[str, ByGap], arguments: argparse.Namespace) -> list[Row]:
    """Per anchor the share passing the mask, a value per gap; for the exact one also the growth of its noise."""
    made = []
    for anchor, values in found.items():
        gaps = sorted(values)
        passing = [round(1 - values[gap]["masked"], 4) for gap in gaps]
        conditions = (
            f"live system, tiny Qwen3-MoE, lr {arguments.lr:g}, mask [0.990, 1.010], one value for each of gaps "
            f"{gaps[0]}..{gaps[-1]}, {sum(int(v['tokens']) for v in values.values())} tokens, {arguments.steps} steps"
        )
        goal = f">= {MASK_PASS}" if anchor == "snapshot" else ""
        made.append(Row(f"mask_pass_by_gap_{anchor}", passing, "", goal, conditions))
        if anchor == "snapshot":
            noise = [values[gap]["log_discrepancy"] for gap in gaps]
            growth = max(noise) / max(noise[0], 1e-12)
            made.append(Row("exact_noise_growth", round(growth, 3), "", f"<= {NOISE_GROWTH}", conditions))
    return made


def draw(found: Mapping[str, ByGap], path: Path) -> None:
    """Two panels over the version gap: share passing the mask, and mean |log r_d|."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for anchor, values in found.items():
        gaps = sorted(values)
        left.plot(gaps, [1 - values[gap]["masked"] for gap in gaps], marker="o", label=anchor)
        right.plot(gaps, [values[gap]["log_discrepancy"] for gap in gaps], marker="o", label=anchor)
    left.set_ylabel("share of tokens that pass the mask [0.990, 1.010]")
    right.set_ylabel("mean |log old/rollout|")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("version gap of the token")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(ROOT / "recipes/configs/quickstart.yaml"))
    parser.add_argument(
        "--model",
        type=Path,
        default=ROOT / "runs/quickstart_warm_start/checkpoint",
        help="a policy that finishes tasks",
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/lag")
    parser.add_argument("--anchors", default=",".join(ANCHORS))
    parser.add_argument("--lag", type=int, default=9, help="versions between two publishings")
    parser.add_argument("--steps", type=int, default=27)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    if not (arguments.model / "config.json").exists():
        print(
            f"{arguments.model} holds no checkpoint; make one with recipes/quickstart.sh, or name one by --model"
        )
        return 2
    found = {anchor: gaps_of(run(anchor, arguments)) for anchor in arguments.anchors.split(",")}
    text = table(found)
    print(text)
    draw(found, arguments.folder / "lag.png")
    if arguments.write:
        write_rows("lag", rows(found, arguments))
        heading = (
            f"By version gap on the live system, lr {arguments.lr:g}, {arguments.steps} steps per anchor."
        )
        (FOLDER / "lag.md").write_text(f"{heading}\n\n{text}\n")
        draw(found, FOLDER / "lag.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
