"""The timeline of one step, as text and as a picture.

Invariants: both show the same intervals: those that overlap the trainer's stages of that step, of every part.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_async.observe.timeline import Interval, merged, window_of_step, within


def lanes(intervals: Iterable[Interval]) -> dict[tuple[str, str], list[Interval]]:
    """Intervals by (part, stage): the trainer's first, each part's stages by their first start."""
    by_lane: dict[tuple[str, str], list[Interval]] = {}
    for interval in sorted(intervals, key=lambda i: (i.part != "trainer", i.part, i.start)):
        by_lane.setdefault((interval.part, interval.stage), []).append(interval)
    return by_lane


def typical_step(intervals: list[Interval], part: str = "trainer") -> int | None:
    """The step of median length among those after the first, which also pays for warming up."""
    steps = sorted({interval.step for interval in intervals if interval.part == part})
    lengths = []
    for step in steps[1:] or steps:
        window = window_of_step(intervals, step, part)
        assert window is not None
        lengths.append((window[1] - window[0], step))
    return sorted(lengths)[len(lengths) // 2][1] if lengths else None


def text_timeline(intervals: list[Interval], step: int, width: int = 60) -> str:
    """The step as rows of blocks, one row per stage of each part.

    A cell is full where the stage ran for at least half of its time, half where it ran at all. Raises ValueError
    when the trainer recorded nothing for the step.
    """
    start, end = _window(intervals, step)
    span = max(end - start, 1e-9)
    rows = []
    for (part, stage), own in lanes(within(intervals, start, end)).items():
        cells = _cells(merged(own), start, span / width, width)
        busy = sum(b - a for a, b in merged(own))
        rows.append((f"{part} {stage}", cells, busy))
    label_width = max((len(label) for label, _, _ in rows), default=0)
    lines = [f"step {step}: {span:.2f} s"]
    lines += [f"{label:<{label_width}} |{cells}| {busy:6.2f} s" for label, cells, busy in rows]
    return "\n".join(lines)


def _window(intervals: list[Interval], step: int) -> tuple[float, float]:
    window = window_of_step(intervals, step)
    if window is None:
        known = sorted({interval.step for interval in intervals if interval.part == "trainer"})
        extent = f"{known[0]} to {known[-1]}" if known else "none"
        raise ValueError(f"the timeline has no stage of the trainer for step {step}; it has steps: {extent}")
    return window


def _cells(busy: list[tuple[float, float]], start: float, cell: float, width: int) -> str:
    text = ""
    for index in range(width):
        low, high = start + index * cell, start + (index + 1) * cell
        share = sum(max(0.0, min(b, high) - max(a, low)) for a, b in busy) / cell
        text += "█" if share >= 0.5 else "▒" if share > 0.0 else " "
    return text


def draw_timeline(intervals: list[Interval], step: int, path: Path) -> None:
    """The step as a PNG; intervals of one stage that overlap are drawn see-through, so that density shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    start, end = _window(intervals, step)
    rows = lanes(within(intervals, start, end))
    figure = Figure(figsize=(10, 1.2 + 0.32 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    parts = list(dict.fromkeys(part for part, _ in rows))
    for row, ((part, _), own) in enumerate(rows.items()):
        alpha = 0.9 if len(own) == len(merged(own)) else 0.35
        bars = [(interval.start - start, interval.seconds) for interval in own]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=f"C{parts.index(part)}", alpha=alpha)
    axes.set_yticks(range(len(rows)), [f"{part}: {stage}" for part, stage in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, end - start)
    axes.set_xlabel("seconds from the step's start")
    axes.set_title(f"Step {step}: which part did what when")
    axes.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
