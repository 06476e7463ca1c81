"""The final report of a run, made from its folder alone, so that it can be made again at any time.

Invariants: numbers come from the run's files and nothing is estimated; what was not recorded shows as a dash.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_async import training_record
from megatron_async.errors import UserError
from megatron_async.labels import describe_labels
from megatron_async.observe import metrics as names
from megatron_async.observe.drawing import draw_timeline, text_timeline, typical_step
from megatron_async.observe.files import RunFiles
from megatron_async.observe.progress import duration, short_number
from megatron_async.observe.timeline import Interval, read_timeline

_BAR = 30
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Report:
    """What a run achieved and where its files are."""

    run_path: Path
    metrics: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]
    timeline: Sequence[Interval]

    @classmethod
    def from_folder(cls, run_path: Path) -> Report:
        """Read a run's folder; raises UserError when it holds no run."""
        if not run_path.is_dir() or not RunFiles(run_path).config.is_file():
            raise UserError(
                f"{run_path} is not the folder of a run (it has no config.yaml); give the folder that launch named, "
                "such as runs/quickstart"
            )
        return cls(
            run_path, names.read_metrics(run_path), names.read_evaluations(run_path), read_timeline(run_path)
        )

    @property
    def gain_points(self) -> float | None:
        """Points of success gained between the first and the last evaluation."""
        if len(self.evaluations) < 2:
            return None
        return 100 * (self.evaluations[-1]["success_rate"] - self.evaluations[0]["success_rate"])

    @property
    def version_gap_mean(self) -> float | None:
        """Mean version gap of all trained action tokens, from the histogram (exact), else from the steps' means."""
        histogram = self.version_gap_histogram
        if histogram:
            return sum(gap * n for gap, n in histogram.items()) / sum(histogram.values())
        means = [row[names.GAP_MEAN] for row in self.metrics if row.get(names.GAP_MEAN) is not None]
        return fmean(means) if means else None

    @property
    def version_gap_histogram(self) -> dict[int, int]:
        """Trained action tokens by version gap."""
        return names.gap_histogram(list(self.metrics))

    @property
    def seconds_by_stage(self) -> dict[str, float]:
        """Mean seconds per step of each stage of the trainer, without the whole step."""
        sums: dict[str, float] = {}
        for row in self.metrics:
            for name, value in row.items():
                if name.startswith(names.SECONDS) and name != names.STEP_SECONDS and value is not None:
                    stage = name.removeprefix(names.SECONDS)
                    sums[stage] = sums.get(stage, 0.0) + value
        return {stage: total / len(self.metrics) for stage, total in sums.items()}

    def write(self, step: int | None = None) -> str:
        """Write report.txt and timeline.png and return the text; `step` picks the step of the timeline.

        Raises UserError when `step` is not on the timeline.
        """
        files = RunFiles(self.run_path)
        shown = typical_step(list(self.timeline)) if step is None else step
        drawing = ""
        if shown is not None:
            try:
                drawing = text_timeline(list(self.timeline), shown)
            except ValueError as error:
                raise UserError(str(error)) from error
            draw_timeline(list(self.timeline), shown, files.timeline_image)
        text = io.StringIO()
        self._render(Console(file=text, width=_WIDTH, highlight=False), drawing)
        files.report.write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def _render(self, console: Console, drawing: str) -> None:
        console.print(self._summary())
        console.print(self._stages())
        console.print(self._gaps())
        if drawing:
            console.print(Text("Timeline of one step", style="bold"))
            console.print(Text(drawing, no_wrap=True))
            console.print()
        console.print(Text(self._files()), soft_wrap=True)

    def _summary(self) -> Table:
        table = Table(title=f"Run {self.run_path.name}", title_justify="left", show_header=False)
        first, last = (self.evaluations[0], self.evaluations[-1]) if self.evaluations else (None, None)
        table.add_row("held-out success before", _success(first))
        table.add_row("held-out success after", _success(last if len(self.evaluations) > 1 else None))
        gain = self.gain_points
        table.add_row("gained", "–" if gain is None else f"{gain:+.1f} points")
        for name, text in _stated(first, last):
            table.add_row(name, Text(text))
        table.add_row("training steps", str(len(self.metrics)))
        version = self.metrics[-1].get(names.VERSION) if self.metrics else None
        table.add_row("last version", short_number(version))
        rewards = [row[names.REWARD] for row in self.metrics if row.get(names.REWARD) is not None]
        window = max(1, min(10, len(rewards) // 2))  # of a short run, halves
        table.add_row(f"reward, first and last {window} step(s)", _first_and_last(rewards, window))
        table.add_row("mean version gap", short_number(self.version_gap_mean))
        table.add_row("training tokens/s", short_number(_mean_of(self.metrics, names.TRAIN_RATE)))
        table.add_row("time in training steps", self._training_time())
        return table

    def _training_time(self) -> str:
        seconds = [row[names.STEP_SECONDS] for row in self.metrics if row.get(names.STEP_SECONDS) is not None]
        return duration(sum(seconds)) if seconds else "–"

    def _stages(self) -> Table:
        table = Table(title="Seconds per step, by stage of the trainer", title_justify="left")
        for title in ("stage", "seconds", "share"):
            table.add_column(title, justify="left" if title == "stage" else "right")
        step = _mean_of(self.metrics, names.STEP_SECONDS)
        for stage, seconds in self.seconds_by_stage.items():
            # A slash marks a part of another stage; it is in that stage's seconds already.
            label = f"  {stage.split('/', 1)[1]}" if "/" in stage else stage
            table.add_row(label, f"{seconds:.3f}", f"{seconds / step:.0%}" if step else "–")
        if step:
            table.add_row("whole step", f"{step:.3f}", "100%")
        return table

    def _gaps(self) -> Table:
        table = Table(title="Trained action tokens by version gap", title_justify="left")
        table.add_column("gap", justify="right")
        table.add_column("tokens", justify="right")
        table.add_column("share")
        histogram = self.version_gap_histogram
        total = sum(histogram.values())
        for gap, tokens in histogram.items():
            share = tokens / total if total else 0.0
            table.add_row(str(gap), f"{tokens:,}", f"{'█' * round(share * _BAR)} {share:.1%}")
        return table

    def _files(self) -> str:
        """One line a file, never folded or cut, so that a path can be copied."""
        files = RunFiles(self.run_path)
        named = (
            ("resolved configuration", files.config),
            ("metrics, a row per step", files.metrics),
            ("evaluations", files.evaluations),
            ("TensorBoard events", files.tensorboard),
            ("logs", files.logs),
            ("final checkpoint (Hugging Face)", files.checkpoint),
            ("timeline of one step", files.timeline_image),
        )
        return "\n".join(["Files", *(f"  {label:<32} {path}" for label, path in named if path.exists())])


def _success(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    episodes = f" ({row['tasks']} tasks)" if "tasks" in row else ""
    error = "" if row["stderr"] is None else f" ± {100 * row['stderr']:.1f}"  # of a single task it is unknown
    return f"{100 * row['success_rate']:.1f} %{error}{episodes}"


def _stated(first: dict[str, Any] | None, last: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What must stand beside the success of two evaluations: what makes it incomparable, and what is known of whom they
    evaluated. Rows of earlier releases lack some of it."""
    before, after = _said(first), _said(last)
    if before == after:
        return [(name, text) for name, text in before.items() if text]
    named = [(f"{name}, before", text) for name, text in before.items()]
    named += [(f"{name}, after", text) for name, text in after.items()]
    return [(name, text) for name, text in named if text]


def _said(row: dict[str, Any] | None) -> dict[str, str]:
    if row is None:
        return {}
    training = row.get("subject", {}).get("training")
    return {
        "not comparable": " ".join(line.strip("*") for line in describe_labels(row.get("labels", {}))),
        "trained on": "" if training is None else training_record.describe(training),
    }


def _first_and_last(values: list[float], count: int) -> str:
    if not values:
        return "–"
    return f"{fmean(values[:count]):.3f}, {fmean(values[-count:]):.3f}"


def _mean_of(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return fmean(values) if values else None


def write_report(run_path: Path, step: int | None = None) -> str:
    """Make the report of a run from its folder; see `Report.from_folder` and `Report.write`."""
    return Report.from_folder(run_path).write(step)
