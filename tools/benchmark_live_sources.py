"""What each route to exact old log-probs costs on the live system, next to the starting weights.

    python -m tools.benchmark_live_sources --model runs/quickstart_warm_start/checkpoint [--write]

Runs of the main job from the same policy, one per source, and a table of medians per step: seconds of the step, of the
stage at batch time and of the forwards behind it; how long generation stood still around an update; how exact the
anchors were. Two figures besides:

- `dedicated`: where the second model's scoring fell. Hidden is what lay under other work of the actor (its update, its
  waiting for trajectories); the rest the actor waited for [dedicated_hidden_share].
- `interrupt`: the pause of generation against the one that publishing alone takes [interrupt_pause_ratio].

--write puts the two into docs/benchmarks/snapshot.json and the table beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_async.observe.timeline import Interval, read_timeline
from tools.benchmark_eager import SKIPPED, Metrics, median, parser_of, run
from tools.benchmark_rows import FOLDER, Row, write_rows

SOURCES: dict[str, dict[str, object]] = {
    "start": {"objective.anchor": "start", "old_logits.reuse_training_forward": "false"},
    "snapshot": {"objective.anchor": "snapshot"},
    "snapshot_full": {"objective.anchor": "snapshot", "old_logits.source": "snapshot_full"},
    "dedicated": {"objective.anchor": "dedicated"},
    "interrupt": {"objective.anchor": "interrupt"},
}
COLUMNS = ("step", "stage", "scoring", "pause", "exact", "mean absolute log r_d")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Where a second model's scoring fell: seconds in all, and those under stages of the actor."""

    scoring: float
    under_update: float
    under_waiting: float

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> Overlap:
        """From a run's timeline, without its first steps."""
        found = [interval for interval in intervals if interval.step >= SKIPPED]
        scoring = [i for i in found if (i.part, i.stage) == ("scorer", "score")]
        actor = {
            stage: [i for i in found if (i.part, i.stage) == ("trainer", stage)]
            for stage in ("update", "wait_batch")
        }
        return cls(
            sum(interval.seconds for interval in scoring),
            shared_seconds(scoring, actor["update"]),
            shared_seconds(scoring, actor["wait_batch"]),
        )


def shared_seconds(left: list[Interval], right: list[Interval]) -> float:
    """Seconds in both an interval of the one list and of the other; intervals of a list do not overlap."""
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in left for b in right)


def line(name: str, rows: Metrics, overlap: Overlap) -> list[str]:
    """A row of the table."""
    scoring = {
        "dedicated": overlap.scoring / max(1, len(rows)),
        "interrupt": sum(row.get("old_logits/ahead/seconds", 0.0) for row in rows) / max(1, len(rows)),
        "start": median(rows, "seconds/old_logits"),
    }.get(
        name,
        sum(
            row.get("old_logits/ahead/seconds", 0.0) + row.get("seconds/old_logits/forward", 0.0)
            for row in rows
        )
        / max(1, len(rows)),
    )
    return [
        name,
        f"{median(rows, 'seconds/step'):.2f}",
        f"{median(rows, 'seconds/old_logits'):.3f}",
        f"{scoring:.3f}",
        f"{pause(rows):.2f}",
        f"{median(rows, 'objective/anchor/exact'):.2f}" if name != "start" else "gap 0",
        f"{median(rows, 'objective/log_discrepancy/mean_abs'):.1e}",
    ]


def pause(rows: Metrics) -> float:
    """Seconds per step that generation stood still (median)."""
    held = "interrupt/paused_seconds"
    return median(rows, held if any(held in row for row in rows) else "publish/paused_seconds")


def figures(runs: dict[str, tuple[Metrics, Overlap]], arguments: argparse.Namespace) -> list[Row]:
    """Rows of the sources that were run."""
    made = []
    shape = f"desk, tiny Qwen3-MoE, {arguments.steps} steps"
    if "dedicated" in runs:
        rows, overlap = runs["dedicated"]
        waited = sum(row.get("seconds/old_logits/wait", 0.0) for row in rows)
        scoring = max(overlap.scoring, 1e-9)
        made.append(
            Row(
                "dedicated_hidden_share",
                round(1 - min(1.0, waited / scoring), 3),
                "",
                "",
                f"{shape}; {overlap.scoring / len(rows):.2f} s of scoring per step on ranks of its own, of them "
                f"{overlap.under_update / len(rows):.2f} s under the actor's update and "
                f"{overlap.under_waiting / len(rows):.2f} s under its waiting for trajectories; the actor waited "
                f"{waited / len(rows):.2f} s for scores; step {median(rows, 'seconds/step'):.2f} s",
            )
        )
    if {"interrupt", "start"} <= runs.keys():
        interrupted, plain = pause(runs["interrupt"][0]), pause(runs["start"][0])
        rows = runs["interrupt"][0]
        made.append(
            Row(
                "interrupt_pause_ratio",
                round(interrupted / plain, 3),
                "",
                "",
                f"{shape}; generation stood still {interrupted:.2f} s a step (collecting, scoring, update, publishing) "
                f"against {plain:.2f} s for publishing alone; "
                f"{median(rows, 'interrupt/trajectories'):.0f} trajectories written down a step",
            )
        )
    return made


def table(runs: dict[str, tuple[Metrics, Overlap]]) -> str:
    """Markdown: medians per step, seconds."""
    lines = ["| source | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (1 + len(COLUMNS))]
    lines += ["| " + " | ".join(line(name, *found)) + " |" for name, found in runs.items()]
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, "live_sources")
    parser.add_argument("--sources", default=",".join(SOURCES), help="comma-separated; default: %(default)s")
    arguments = parser.parse_args()
    unknown = set(arguments.sources.split(",")) - set(SOURCES)
    if unknown:
        parser.error(f"unknown sources {sorted(unknown)}; known: {', '.join(SOURCES)}")
    runs: dict[str, tuple[Metrics, Overlap]] = {}
    for name in arguments.sources.split(","):
        folder, rows = run(name, SOURCES[name], arguments)
        runs[name] = rows, Overlap.of(read_timeline(Path(folder)))
    print(table(runs))
    made = figures(runs, arguments)
    for row in made:
        print(f"{row.figure} {row.value}: {row.conditions}")
    if arguments.write:
        write_rows("snapshot", made)
        (FOLDER / "snapshot_live.md").write_text(
            f"Every exact route on the live system, {arguments.steps} steps of the main job each, from one policy. "
            "Seconds per step, medians; `scoring` are the forwards for old log-probs, wherever they ran; `pause` is "
            "how long generation stood still; `exact` is the share of tokens with an exact anchor.\n\n"
            f"{table(runs)}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
