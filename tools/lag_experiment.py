"""How the discrepancy ratio and the mask behave as tokens get older, by anchor, on the live system.

The falsifiable prediction of arXiv 2605.12070: with a mask of one per cent on old/rollout, tokens are rejected the more
the older they are where the anchor is not exact, since the policy's drift enters the ratio; with an exact anchor the
ratio is engine noise whatever the age, and nothing is rejected. Two shares are shown, since they answer two questions:
the one that passes the mask alone (the prediction), and the active fraction ρ after mask and clip. The clip acts on
current/old, which is the policy's own movement: with an exact anchor it ends old tokens' updates, as it should, while
with `start` its ratio is exactly 1 in a batch's first update and it never acts.

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
from collections.abc import Callable, Mapping
from math import nan
from pathlib import Path
from typing import Any

from megatron_async.config import RunConfig, dump, load, save
from megatron_async.config.methods import ANCHORS as METHOD_ANCHORS
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
# What is drawn over the gap: label, value, whether the axis is logarithmic.
PANELS: tuple[tuple[str, Callable[[Mapping[str, float]], float], bool], ...] = (
    ("share that passes the mask [0.990, 1.010]", lambda values: 1 - values["masked"], False),
    ("active fraction ρ (mask and clip)", lambda values: values["active"], False),
    ("mean |log r_d|, r_d = old/rollout", lambda values: values["log_discrepancy"], True),
)
RESETS = "ewma/resets"
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
    return load(arguments.config, [*(f"{key}={value}" for key, value in overrides.items()), *arguments.set])


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
    save(config, file)
    command = [sys.executable, "-m", "megatron_async", "launch", "--fresh", "--config", str(file)]
    print(f"{anchor}: {' '.join(command)}", flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the run of anchor {anchor} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    metrics = read_metrics(config.run_path)
    resets = max((step.get(RESETS, 0.0) for step in metrics), default=0.0)
    row = {"identity": key, "anchor": anchor, "gaps": by_gap(metrics), "resets": int(resets)}
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
    """Per anchor the three curves, a value per gap; for the exact one also the growth of its noise."""
    made = []
    for anchor, values in found.items():
        gaps = sorted(values)
        conditions = (
            f"live system, tiny Qwen3-MoE float32, lr {arguments.lr:g}, mask [0.990, 1.010], clip [0.997, 1.004], one "
            f"value for each of gaps {', '.join(map(str, gaps))}; {sum(int(v['tokens']) for v in values.values())} "
            f"tokens, {arguments.steps} steps, publishing every {arguments.lag} steps"
        )
        passing = [round(1 - values[gap]["masked"], 4) for gap in gaps]
        active = [round(values[gap]["active"], 4) for gap in gaps]
        noise = [float(f"{values[gap]['log_discrepancy']:.3g}") for gap in gaps]
        exact = METHOD_ANCHORS[anchor].exact
        goal = f">= {MASK_PASS}" if exact else ""
        made.append(Row(f"mask_pass_by_gap_{anchor}", passing, "", goal, conditions))
        made.append(Row(f"active_by_gap_{anchor}", active, "", "", conditions))
        made.append(Row(f"log_discrepancy_by_gap_{anchor}", noise, "nats", "", conditions))
        if exact:
            growth = max(noise) / max(noise[0], 1e-12)
            made.append(Row("exact_noise_growth", round(growth, 3), "", f"<= {NOISE_GROWTH}", conditions))
    return made


def draw(found: Mapping[str, ByGap], path: Path) -> None:
    """The panels of `PANELS` over the version gap, a line per anchor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, drawn = pyplot.subplots(1, len(PANELS), figsize=(6 * len(PANELS), 4.5))
    for axes, (label, value, logarithmic) in zip(drawn, PANELS, strict=True):
        for anchor, values in found.items():
            gaps = sorted(values)
            name = f"{anchor} (exact)" if METHOD_ANCHORS[anchor].exact else anchor
            # A mean of exactly 0 (linear at gap 0 is the rollout's own log-prob) has no place on a logarithmic axis.
            points = [value(values[gap]) for gap in gaps]
            shown = [point if point > 0 or not logarithmic else nan for point in points]
            axes.plot(gaps, shown, marker="o", label=name)
        axes.set_ylabel(label)
        axes.set_xlabel("version gap of the token")
        if logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(top=1.005)
        axes.grid(alpha=0.3)
    drawn[0].legend()
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
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the runs")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    if not (arguments.model / "config.json").exists():
        print(
            f"{arguments.model} holds no checkpoint; make one with recipes/quickstart.sh, or name one by --model"
        )
        return 2
    made = {anchor: run(anchor, arguments) for anchor in arguments.anchors.split(",")}
    found = {anchor: gaps_of(row) for anchor, row in made.items()}
    text = table(found)
    if "ewma" in made:
        restarts = made["ewma"]["resets"]
        text += f"\n\nThe average of `ewma` restarted {restarts} times in {arguments.steps} steps (ρ < 0.9)."
    print(text)
    draw(found, arguments.folder / "lag.png")
    if arguments.write:
        heading = (
            f"By version gap on the live system, lr {arguments.lr:g}, {arguments.steps} steps per anchor. The "
            "prediction speaks of the share that passes the mask: flat for the exact anchor, falling for the others. ρ "
            "also counts what the clip on current/old ends, which an exact anchor lets act on old tokens and `start` "
            "never does."
        )
        (FOLDER / "lag.md").write_text(f"{heading}\n\n{text}\n")
        draw(found, FOLDER / "lag.png")
        write_rows("lag", rows(found, arguments))  # last: it renders the page
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
