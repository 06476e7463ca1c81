"""What every source of old log-probs costs on the same batches, in the form of arXiv 2605.12070's Tables 3 and 6.

    python -m tools.benchmark_snapshot                              # synthetic batches, one rank
    python -m tools.benchmark_snapshot --run runs/quickstart        # the batches that a run trained on
    torchrun --nproc-per-node 2 -m tools.benchmark_snapshot --expert-parallel 2 --lr 1e-6 --gap 3 --spans 1.8

Every source drives a policy of its own through the same steps: score the batch, update on it, record the new version.
The sources take turns step by step, so that a busy moment of the machine does not fall on one of them alone; a figure
is the median over the steps after the first `gap`. `start` does one forward over the batch, as a trainer without a
history does; the others must be compared with it. No source takes anything from the training forward, except
`snapshot_reuse`, which leaves tokens of the present version to it, and `linear`, which needs no old log-probs.
`snapshot_ahead` finds `--ahead` of its trajectories scored while the trainer waited, as `snapshots.eager` does;
`interrupt` scores what the present version has sampled of later batches before each update, and its stage contains that
pause. (A dedicated model runs on ranks of its own: `tools.benchmark_live_sources`.)

--write puts rows into docs/benchmarks/snapshot.json, the table and a figure beside it; --json FILE has every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_async.config import RunConfig, from_dict
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.objectives import build_objective
from megatron_async.old_logits import AnchorLogprobs, build_source
from megatron_async.old_logits.snapshot import SnapshotSource
from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint
from megatron_async.rollout.environments.desk_tokenizer import VOCABULARY_SIZE
from megatron_async.training.batch import with_arrays
from megatron_async.training.loss import global_counts, policy_loss
from tools.benchmark_rows import FOLDER, Row, write_rows
from tools.snapshot_batches import Recipe, recorded, synthetic

SHAPE = TinyShape(
    hidden=256, layers=6, heads=8, key_value_heads=4, head_dim=32, experts=16, expert_hidden=128
)
OPTIONS: dict[str, dict[str, object]] = {
    "start": {"objective.anchor": "start"},
    "linear": {"objective.anchor": "linear"},
    "ewma": {"objective.anchor": "ewma"},
    "snapshot": {"objective.anchor": "snapshot"},
    "snapshot_reuse": {"objective.anchor": "snapshot", "old_logits.reuse_training_forward": True},
    "snapshot_ahead": {"objective.anchor": "snapshot", "snapshots.eager": True},
    "snapshot_full": {"objective.anchor": "snapshot", "old_logits.source": "snapshot_full"},
    "interrupt": {"objective.anchor": "interrupt"},
}
T = TypeVar("T")
STAGES = ("save", "load", "restore", "forward")
"""As the paper names them: record a version, put old weights in place, take them back, forward under them."""


@dataclass(slots=True)
class Costs:
    """Seconds of one source by step, bytes of its history, and what its last batch was made of."""

    stages: dict[str, list[float]] = field(default_factory=dict)
    memory: int = 0
    forward_tokens: float = 0.0

    def add(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self.stages.setdefault(name, []).append(value)

    def median(self, name: str, skip: int) -> float:
        return statistics.median(self.stages[name][skip:])

    def mean(self, name: str, skip: int) -> float:
        return statistics.fmean(self.stages[name][skip:])


class Contestant:
    """One source with a policy of its own."""

    def __init__(self, config: RunConfig, ahead: float) -> None:
        self.config, self.ahead = config, ahead
        self.policy = Policy.build(config.model, config.layout, config.trainer, config.optimizer, config.seed)
        self.objective = build_objective(config.objective)
        self.source = build_source(config, self.policy, self.objective.needs)
        self.version = 0
        self.costs = Costs()

    def step(self, batch: list[Sequence], later: list[list[Sequence]]) -> None:
        """One training step without sampling and publishing. later: the batches that follow, in parts sampled now."""
        ids = [f"{self.version}.{i}" for i in range(len(batch))]
        before = 0.0
        if self.source.scores_ahead:
            early = round(self.ahead * len(batch))
            _, before = clocked(lambda: self.source.score_ahead(batch[:early], ids[:early]))
        anchors, stage = clocked(lambda: self.source.score(batch, ids))
        if self.source.interrupts:
            partial = [
                (sequence, f"{self.version + behind}.{i}")
                for behind, following in enumerate(later[: self.config.rollout.max_staleness], 1)
                for i, whole in enumerate(following)
                if (sequence := sampled_by_now(whole, behind)) is not None
            ]
            now, keys = [sequence for sequence, _ in partial], [key for _, key in partial]
            _, before = clocked(lambda: self.source.score_ahead(now, keys))
            stage += before
        _, update = clocked(lambda: self._update(batch, anchors))
        self.version += 1
        oldest = self.version - self.config.rollout.max_staleness
        _, save = clocked(lambda: self.source.updated(self.version, oldest))
        report = self.source.captured if isinstance(self.source, SnapshotSource) else None
        if report is not None:  # without a shadow copy the differences were taken inside the update
            update, save = update + save - report.seconds, report.seconds
        self._note(anchors, before=before, stage=stage + save, save=save, step=stage + update + save)
        self.costs.memory = self._memory(anchors)
        self.costs.forward_tokens = anchors.metrics.get("old_logits/forward_tokens", sum(map(len, batch)))

    def _note(self, anchors: AnchorLogprobs, **seconds: float) -> None:
        parts = anchors.seconds
        switch = parts.get("switch", 0.0) / 2  # in and out are one exchange each
        self.costs.add(
            load=parts.get("travel", switch), restore=parts.get("restore", switch), forward=parts.get("forward", 0.0),
            shards=anchors.metrics.get("old_logits/shards_per_trajectory", 1.0), **seconds,
        )  # fmt: skip

    def _update(self, batch: list[Sequence], anchors: AnchorLogprobs) -> None:
        loss = policy_loss(self.objective, global_counts(batch))
        skipped = self.policy.train_step(with_arrays(batch, anchors), loss).skipped
        assert skipped is None, skipped

    def _memory(self, anchors: AnchorLogprobs) -> int:
        """Bytes this rank holds for the source, copies of the weights included."""
        tiers = ("shadow", "host", "device")
        found = sum(anchors.metrics.get(f"snapshots/bytes/{tier}", 0.0) for tier in tiers)
        if "ewma/weight" in anchors.metrics:
            found = sum(master.numel() * 4 for master in self.policy.masters())
        return int(found)


def sampled_by_now(sequence: Sequence, behind: int) -> Sequence | None:
    """What the present version and those before it have sampled of a trajectory that is trained `behind` steps later.

    None where the present version sampled nothing of it.
    """
    mask, gaps = sequence.arrays["action_mask"], sequence.arrays["version_gap"] - behind
    to_come = np.flatnonzero(mask & (gaps < 0))
    end = int(to_come[0]) if to_come.size else len(sequence)
    if not (mask & (gaps == 0))[:end].any():
        return None
    arrays = {
        "action_mask": mask[:end],
        "version_gap": np.where(mask, gaps, 0)[:end],
        "kv_mismatch": sequence.arrays["kv_mismatch"][:end],
    }
    return Sequence(sequence.token_ids[:end], sequence.temperature, arrays)


def clocked(work: Callable[[], T]) -> tuple[T, float]:
    """The result and the seconds until every rank had one."""
    platform.setup().synchronize()
    dist.barrier()
    began = time.perf_counter()
    result = work()
    platform.setup().synchronize()
    dist.barrier()
    return result, time.perf_counter() - began


def configuration(name: str, arguments: argparse.Namespace, model: Path, folder: Path) -> RunConfig:
    """The run that a user of this source would configure, with captures that the loop waits for."""
    nested: dict[str, dict[str, object]] = {}
    for key, value in OPTIONS[name].items():
        section, option = key.split(".")
        nested.setdefault(section, {})[option] = value
    objective = {"name": "ppo", **nested.pop("objective", {})}
    old_logits = {"reuse_training_forward": False, **nested.pop("old_logits", {})}
    snapshots = {"background": False, "eager": False, "disk_bytes": 0, "threads": arguments.threads}
    return from_dict({
        "name": name,
        "run_dir": str(folder),
        "model": {"path": str(model), "dtype": arguments.dtype},
        "layout": {
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "tensor_model_parallel_size": arguments.tensor_parallel,
            "expert_model_parallel_size": arguments.expert_parallel,
        },
        "trainer": {"micro_batch_tokens": arguments.micro_batch_tokens},
        "optimizer": {"lr": arguments.lr},
        "objective": objective,
        "old_logits": old_logits,
        "snapshots": snapshots | nested.pop("snapshots", {}),
        "rollout": {"max_staleness": arguments.gap, "max_tokens": arguments.micro_batch_tokens},
    })  # fmt: skip


def batches(arguments: argparse.Namespace) -> list[list[Sequence]]:
    if arguments.run:
        found = recorded(Path(arguments.run))[: arguments.steps]
        return [batch[:: -(-len(batch) // arguments.trajectories)] for batch in found]
    recipe = Recipe(arguments.trajectories, arguments.tokens, arguments.gap, arguments.spans, VOCABULARY_SIZE)
    return [synthetic(recipe, step) for step in range(arguments.steps)]


def measure(arguments: argparse.Namespace) -> dict[str, Costs]:
    """Costs by source. Raises UserError for a run without batches."""
    with tempfile.TemporaryDirectory() as scratch:
        names = arguments.sources.split(",")
        model = Path(arguments.model) if arguments.model else made_model(Path(scratch))
        steps = batches(arguments)
        contestants = {
            name: Contestant(configuration(name, arguments, model, Path(scratch)), arguments.ahead)
            for name in names
        }
        for number, batch in enumerate(steps):
            # Every other step the order is reversed: whoever goes first finds the caches cold.
            for name in names if number % 2 else names[::-1]:
                contestants[name].step(batch, steps[number + 1 :])
        for contestant in contestants.values():
            contestant.source.close()
        return {name: contestant.costs for name, contestant in contestants.items()}


def made_model(folder: Path) -> Path:
    """The same random checkpoint on every rank of this machine."""
    path = folder / "model"
    write_tiny_checkpoint(path, 0, SHAPE)
    return path


def table(costs: dict[str, Costs], skip: int) -> str:
    """Markdown: a row per source; seconds are medians per step, ratios are to `start`."""
    header = [
        "source",
        *STAGES,
        "stage",
        "stage ratio",
        "step",
        "step ratio",
        "before",
        "memory MB",
        "shards",
        "tokens",
    ]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    reference = costs.get("start")
    for name, cost in costs.items():
        stages = [f"{cost.median(stage, skip):.3f}" for stage in STAGES]
        stage, step = cost.median("stage", skip), cost.median("step", skip)
        ratios = (
            ("–", "–")
            if reference is None
            else (
                f"{stage / reference.median('stage', skip):.2f}",
                f"{step / reference.median('step', skip):.2f}",
            )
        )
        cells = [
            name,
            *stages,
            f"{stage:.3f}",
            ratios[0],
            f"{step:.3f}",
            ratios[1],
            f"{cost.median('before', skip):.3f}",
        ]
        cells += [
            f"{cost.memory / 1e6:.1f}",
            f"{cost.mean('shards', skip):.2f}",
            f"{cost.forward_tokens:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rows(costs: dict[str, Costs], arguments: argparse.Namespace, skip: int) -> list[Row]:
    """Stage of every source over the stage of `start`."""
    start = costs["start"].median("stage", skip)
    held = max(cost.mean("shards", skip) for cost in costs.values())
    spans = f"{held:.1f}" if arguments.run else f"{arguments.spans:g}"
    where = (
        f"recorded batches of a run on the desk, at most {arguments.trajectories} trajectories of each"
        if arguments.run
        else f"{arguments.trajectories} x {arguments.tokens} tokens"
    )
    made = []
    for name, cost in costs.items():
        if name == "start":
            continue
        parts = ", ".join(f"{stage} {cost.median(stage, skip):.3f}" for stage in STAGES)
        conditions = (
            f"{where}, gap <= {arguments.gap}, {held:.2f} versions per trajectory, lr {arguments.lr:g}, "
            f"{arguments.dtype}, {arguments.layout_text}; seconds: {parts}, stage of start {start:.3f}"
        )
        figure = f"stage_ratio_{spans}_shards" if name == "snapshot" else f"stage_ratio_{spans}_shards_{name}"
        goal = "<= 1.15" if figure == "stage_ratio_1.1_shards" else ""
        made.append(Row(figure, round(cost.median("stage", skip) / start, 3), "", goal, conditions))
    return made


def draw(costs: dict[str, Costs], skip: int, path: Path) -> None:
    """A bar per source, its stages on top of one another."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    bottom = [0.0] * len(costs)
    labels = {"before": "before the batch (in idle time for snapshot_ahead)"}
    for stage in (*STAGES, "before"):
        heights = [cost.median(stage, skip) for cost in costs.values()]
        axes.bar(list(costs), heights, bottom=bottom, label=labels.get(stage, stage))
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_ylabel("seconds per step (median)")
    axes.set_title("Old log-prob stage by source, same batches")
    axes.legend()
    axes.tick_params("x", rotation=20)
    axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", help="folder of a run whose batches are used")
    parser.add_argument(
        "--model", help="checkpoint; default: a random Qwen3 mixture of experts of 15 M parameters"
    )
    parser.add_argument("--sources", default=",".join(OPTIONS), help="comma-separated; default: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--gap", type=int, default=3, help="oldest version, in versions behind")
    parser.add_argument("--spans", type=float, default=1.1, help="versions per synthetic trajectory")
    parser.add_argument("--ahead", type=float, default=0.9, help="share of a batch that was scored ahead")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--trajectories", type=int, default=32, help="per batch; most of a recorded one")
    parser.add_argument("--tokens", type=int, default=256, help="of the longest trajectory")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the seconds of every step, by source")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks")
    options = parser.parse_args(arguments)
    unknown = set(options.sources.split(",")) - set(OPTIONS)
    if unknown:
        parser.error(f"unknown sources {sorted(unknown)}; known: {', '.join(OPTIONS)}")
    if options.steps <= options.gap:
        parser.error(f"--steps {options.steps} must exceed --gap {options.gap}: gaps grow step by step")
    ranks = os.environ.get("WORLD_SIZE", "1")
    options.layout_text = f"{ranks} rank(s), TP {options.tensor_parallel}, EP {options.expert_parallel}"
    return options


def main() -> int:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    costs = measure(arguments)
    if dist.get_rank() == 0:
        skip = arguments.gap
        text = table(costs, skip)
        print(text)
        if arguments.json:
            arguments.json.write_text(
                json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1)
            )
        if arguments.write and "start" in costs:
            write_rows("snapshot", rows(costs, arguments, skip))
            (FOLDER / "snapshot.md").write_text(
                f"Old log-prob stage of every source on the same batches (`{' '.join(sys.argv[1:]) or 'defaults'}`), "
                f"{arguments.layout_text}. Seconds per step, medians; memory is this rank's, copies of the weights "
                "included; ratios are to `start`, which does one forward; `before` is what was scored before the "
                "batch came, in idle time (`snapshot_ahead`) or while generation stood still (`interrupt`, part of "
                f"its stage).\n\n{text}\n"
            )
            draw(costs, skip, FOLDER / "snapshot_stages.png")
    platform.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
