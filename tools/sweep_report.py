"""Table and figures of a sweep, from its finished rows.

Invariants: a line or number over seeds shows its spread (sample standard deviation, as a band or bar) and says how many
seeds it has; nothing is smoothed without the legend saying so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.benchmark_rows import FOLDER, Row, write_rows
from tools.sweep_plan import Run, Sweep
from tools.sweep_recovery import recoveries

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 5
"""Steps of the running mean in curves; noise of a batch's mean reward hides the trend otherwise."""

_COLUMNS = {
    "before, %": ("success_before", 100.0, 1),
    "after, %": ("success_after", 100.0, 1),
    "gap": ("version_gap", 1.0, 2),
    "ρ": ("active", 1.0, 3),
    "masked": ("masked", 1.0, 3),
    "clipped": ("clipped", 1.0, 3),
    "ESS": ("ess", 1.0, 3),
    "explained variance": ("explained_variance", 1.0, 2),
    "action tokens, k": ("action_tokens", 1e-3, 1),
    "s/step": ("step_seconds", 1.0, 2),
    "waiting, %": ("waiting", 100.0, 0),
    "run, s": ("seconds", 1.0, 0),
}
"""Heading -> measure, factor and digits. Columns that no run has a value for are left out."""

Rows = list[dict[str, Any]]


def finished_rows(runs: Sequence[Run], latest: Mapping[str, dict[str, Any]]) -> Rows:
    """Finished rows of the present plan, in its order; rows of configurations since changed are left out."""
    known = [latest.get(run.identity) for run in runs]
    return [row for row in known if row is not None and row["status"] == "finished"]


def grouped(rows: Rows) -> dict[tuple[str, ...], Rows]:
    """Values of the axes -> rows of all seeds, in order of appearance."""
    groups: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row["values"].values()), []).append(row)
    return groups


def value_of(row: Mapping[str, Any], name: str) -> float | None:
    """A measure of a row; `clipped` is both ends, `stale` the trajectories thrown away as too old, `waiting` the share
    of the trainer's time in which it had no batch."""
    if name == "clipped":
        ends = [row["clipped_high"], row["clipped_low"]]
        return None if None in ends else sum(ends)
    if name == "stale":
        return float(row["trajectories"]["stale"])
    if name == "waiting":
        return float(row["wait_seconds"]) / float(row["step_seconds"])
    value: float | None = row.get(name)
    return value


def columns_of(rows: Rows) -> dict[str, tuple[str, float, int]]:
    """The columns that some run has a value for."""
    return {
        heading: column
        for heading, column in _COLUMNS.items()
        if any(value_of(row, column[0]) is not None for row in rows)
    }


def mean_and_spread(values: Sequence[float | None]) -> tuple[float, float, int] | None:
    """Mean, sample standard deviation (0 for one value) and number of the known values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return fmean(known), stdev(known) if len(known) > 1 else 0.0, len(known)


def table(rows: Rows) -> str:
    """Markdown: a row for each configuration, mean ± spread over its seeds."""
    axes, columns = list(rows[0]["values"]), columns_of(rows)
    recovered = {id(row): found for row, found in zip(rows, recoveries(rows), strict=True)}
    switches = range(max(map(len, recovered.values())))
    heads = [*axes, "seeds", *columns, *(f"steps to recover, switch {i + 1}" for i in switches), "stale"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for values, members in grouped(rows).items():
        cells = [_cell(members, *column) for column in columns.values()]
        cells += [_recovery_cell([recovered[id(row)] for row in members], i) for i in switches]
        stale = sum(int(row["trajectories"]["stale"]) for row in members)
        lines.append("| " + " | ".join([*values, str(len(members)), *cells, str(stale)]) + " |")
    return "\n".join(lines)


def _cell(members: Rows, name: str, scale: float, digits: int) -> str:
    found = mean_and_spread([value_of(row, name) for row in members])
    if found is None:
        return "–"
    mean, spread, count = found
    text = f"{scale * mean:.{digits}f}" + (f" ± {scale * spread:.{digits}f}" if count > 1 else "")
    return text if count == len(members) else f"{text} ({count} of {len(members)})"


def _recovery_cell(members: Sequence[Sequence[tuple[int, bool]]], switch: int) -> str:
    found = [row[switch] for row in members if switch < len(row)]
    if not found:
        return "–"
    mean, spread, count = mean_and_spread([float(steps) for steps, _ in found]) or (0.0, 0.0, 0)
    text = f"{mean:.1f}" + (f" ± {spread:.1f}" if count > 1 else "")
    came = sum(reached for _, reached in found)
    return text if came == len(found) else f"≥ {text} ({came} of {len(found)} recovered)"


def write(sweep: Sweep, rows: Rows, folder: Path, *, publish: bool) -> str:
    """Write report.md and the figures into `folder`, and with `publish` into docs/benchmarks; returns the text."""
    text = f"{_heading(sweep, rows)}\n\n{table(rows)}\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    draw(sweep, rows, folder, "report")
    if publish:
        name = f"sweep_{sweep.name}"
        (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
        draw(sweep, rows, FOLDER, name)
        write_rows(name, figures(rows))
    return text


def _heading(sweep: Sweep, rows: Rows) -> str:
    seeds, steps = sorted({row["seed"] for row in rows}), sorted({row["steps"] for row in rows})
    return (
        f"Sweep `{sweep.name}`: {len(rows)} finished runs of {' or '.join(map(str, steps))} steps on seeds "
        f"{', '.join(map(str, seeds))}; mean ± sample standard deviation over seeds. ρ, masked, clipped, ESS and gap "
        "are over all trained action tokens; success is on held-out tasks. Waiting: share of the trainer's time "
        "without a batch. Stale: trajectories thrown away as too old. Steps to recover: from a switch to the first "
        "five steps whose mean reward is 90 % of what the runs of the seed held at best before the first switch, on "
        "average; a run that never came there counts with the whole phase."
    )


def figures(rows: Rows) -> list[Row]:
    """Held-out success after training for each configuration, one value a seed, in the benchmarks' form."""
    made = []
    for values, members in grouped(rows).items():
        words = "_".join(["success", *values]).lower()
        name = "".join(c if c.isalnum() else "_" for c in words)
        before = ", ".join(f"{row['success_before']:.3f}" for row in members)
        seeds = ", ".join(str(row["seed"]) for row in members)
        conditions = f"held-out success after training, one value for each of seeds {seeds}; before: {before}"
        made.append(Row(name, [round(row["success_after"], 4) for row in members], conditions=conditions))
    return made


# ---------------------------------------------------------------------------------------------- figures


def draw(sweep: Sweep, rows: Rows, folder: Path, name: str) -> list[Path]:
    """Write NAME_curves.png and NAME_against_AXIS.png, as far as the sweep asks for them; returns them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written, against = [], sweep.plots.against
    plans: list[tuple[str, Sequence[str]]] = [("curves", sweep.plots.curves)]
    if against.axis:
        plans.append((f"against_{against.axis}", against.measures))
    for suffix, subjects in plans:
        if not subjects:
            continue
        figure, all_axes = pyplot.subplots(1, len(subjects), figsize=(7.5 * len(subjects), 5), squeeze=False)
        for axes, subject in zip(all_axes[0], subjects, strict=True):
            if suffix == "curves":
                _draw_curve(axes, rows, subject)
            else:
                _draw_against(axes, rows, against.axis, subject)
        figure.tight_layout()
        path = folder / f"{name}_{suffix}.png"
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        written.append(path)
    return written


def curve_over_seeds(members: Rows, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample standard deviation [steps] over seeds of the running mean over WINDOW steps.

    A step without a value (a batch without a signal) is left out of the mean; NaN where no seed has any.
    """
    steps = max(len(row["curve"].get(metric, [])) for row in members)
    smooth = np.full((len(members), steps), math.nan)
    for i, row in enumerate(members):
        values = np.array([math.nan if v is None else v for v in row["curve"].get(metric, [])], dtype=float)
        for step in range(len(values)):
            window = values[max(0, step - WINDOW + 1) : step + 1]
            known = window[~np.isnan(window)]
            smooth[i, step] = known.mean() if known.size else math.nan
    counts = (~np.isnan(smooth)).sum(axis=0)
    mean = np.where(counts > 0, np.nansum(smooth, axis=0) / np.maximum(counts, 1), math.nan)
    squares = np.nansum((smooth - mean) ** 2, axis=0)
    return mean, np.where(counts > 1, np.sqrt(squares / np.maximum(counts - 1, 1)), 0.0)


def _draw_curve(axes: Axes, rows: Rows, metric: str) -> None:
    for (values, members), style in zip(grouped(rows).items(), _styles(len(grouped(rows))), strict=True):
        mean, spread = curve_over_seeds(members, metric)
        steps = np.arange(1, len(mean) + 1)
        label = f"{', '.join(values)} ({len(members)} seed{'s' if len(members) > 1 else ''})"
        (line,) = axes.plot(steps, mean, label=label, **style)
        axes.fill_between(
            steps, mean - spread, mean + spread, color=line.get_color(), alpha=0.12, linewidth=0
        )
    axes.set_xlabel("training step")
    axes.set_ylabel(f"{metric}, running mean of {WINDOW} steps")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_against(axes: Axes, rows: Rows, axis: str, measure: str) -> None:
    lines: dict[str, dict[float, list[float | None]]] = {}
    for row in rows:
        others = ", ".join(value for name, value in row["values"].items() if name != axis)
        points = lines.setdefault(others, {})
        points.setdefault(float(row["values"][axis]), []).append(value_of(row, measure))
    for (label, points), style in zip(lines.items(), _styles(len(lines)), strict=True):
        known = [(x, found) for x in sorted(points) if (found := mean_and_spread(points[x])) is not None]
        if not known:
            continue
        axes.errorbar(
            [x for x, _ in known], [found[0] for _, found in known], [found[1] for _, found in known],
            label=label, marker="o", capsize=3, **style,
        )  # fmt: skip
    axes.set_xlabel(axis)
    axes.set_ylabel(f"{measure} (mean and spread over seeds)")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _styles(count: int) -> list[dict[str, Any]]:
    """Colours that differ, dashed once they repeat."""
    return [{"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--"} for i in range(count)]
