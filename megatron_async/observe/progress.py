"""The live view of a run: step, reward, version gap, tokens/s, and what each part does or waits for.

Invariants: it only reads the run's files, so it cannot disturb the run; whoever supervises calls `refresh` as often as
it likes; output goes through one console, and nothing is drawn where the output is no terminal.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_async.config.schema import RunConfig
from megatron_async.observe import metrics as names
from megatron_async.observe.files import RunFiles
from megatron_async.observe.rows import RowTail
from megatron_async.observe.status import Status, read_status

HEARTBEAT_S = 30.0
"""In plain mode, seconds without a new step after which the state of the parts is printed."""
_RATE_WINDOW_S = 20.0
_RECENT = 10


def short_number(value: float | None) -> str:
    """A number in at most five characters or so: 0.613, 14.2, 5.3k, 1.9M; a dash for none."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.1f}{unit}"
    if float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """12 s, 3:07, 1:02:45."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Rate:
    """Rate of a growing counter over the last seconds."""

    def __init__(self, window_s: float = _RATE_WINDOW_S) -> None:
        self._window = window_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, at: float, total: float) -> float | None:
        """Note the counter's value; returns units per second, or None while there are not two readings."""
        if self._points and total < self._points[-1][1]:
            self._points.clear()  # the process was started anew
        if not self._points or at > self._points[-1][0]:
            self._points.append((at, total))
        while len(self._points) > 2 and self._points[0][0] < at - self._window:
            self._points.popleft()
        (first, before), (last, after) = self._points[0], self._points[-1]
        return (after - before) / (last - first) if last > first else None


class Progress:
    """Shows a run while it goes on.

    >>> with Progress(cfg) as progress:
    ...     while running:
    ...         progress.refresh()
    """

    def __init__(self, config: RunConfig, console: Console | None = None) -> None:
        self._config = config
        self._run_path = config.run_path
        self._tail = RowTail(RunFiles(config.run_path).metrics)
        self._console = console or Console(highlight=False)
        mode = config.observe.progress
        self._mode = "plain" if mode == "rich" and not self._console.is_terminal else mode
        self._live: Live | None = None
        self._rows: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._generation = Rate()
        self._rate: float | None = None
        self._started = time.time()
        self._last_line = time.time()

    def __enter__(self) -> Progress:
        if self._mode == "rich":
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, message: str) -> None:
        """Print a line above the live view."""
        if self._mode != "off":
            self._console.print(message, markup=False)

    def refresh(self) -> None:
        """Read what is new and show it."""
        if self._mode == "off":
            return
        parts = read_status(self._run_path)
        self._note_generation(parts)
        fresh = self._tail.new()
        self._rows.extend(fresh)
        if self._live is not None:
            self._live.update(self._view(parts), refresh=True)
        else:
            self._print_lines(fresh, parts)

    def _note_generation(self, parts: Mapping[str, Status]) -> None:
        totals = [s.counters["generated_tokens"] for s in parts.values() if "generated_tokens" in s.counters]
        if totals:
            newest = max(s.time for s in parts.values() if "generated_tokens" in s.counters)
            self._rate = self._generation.add(newest, sum(totals))

    def _numbers(self, row: Mapping[str, Any]) -> list[tuple[str, str]]:
        recent = [r[names.REWARD] for r in self._rows if r.get(names.REWARD) is not None]
        mean = sum(recent) / len(recent) if recent else None
        return [
            ("reward", f"{short_number(row.get(names.REWARD))} (last {len(recent)}: {short_number(mean)})"),
            ("version", short_number(row.get(names.VERSION))),
            ("version gap", short_number(row.get(names.GAP_MEAN))),
            ("training", f"{short_number(row.get(names.TRAIN_RATE))} tokens/s"),
            ("generation", f"{short_number(self._rate)} tokens/s"),
            ("step took", duration(row.get(names.STEP_SECONDS) or 0.0)),
        ]

    def _remaining(self, done: int) -> str:
        seconds = [r[names.STEP_SECONDS] for r in self._rows if r.get(names.STEP_SECONDS) is not None]
        left = self._config.steps - done
        return duration(left * sum(seconds) / len(seconds)) if seconds and left > 0 else "–"

    def _view(self, parts: Mapping[str, Status]) -> RenderableType:
        row = self._rows[-1] if self._rows else {}
        done = int(row["step"]) + 1 if row else 0
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self._config.name, style="bold"),
            Text(f"step {done}/{self._config.steps}"),
            ProgressBar(total=self._config.steps, completed=done, width=30),
            Text(f"{duration(time.time() - self._started)} gone, {self._remaining(done)} left"),
        )
        numbers = Table.grid(padding=(0, 2))
        for label, value in self._numbers(row):
            numbers.add_row(Text(label, style="dim"), Text(value))
        return Group(head, numbers, self._parts_table(parts))

    def _parts_table(self, parts: Mapping[str, Status]) -> Table:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for title in ("part", "does", "waits for", "since"):
            table.add_column(title)
        for status in parts.values():
            waiting = Text(status.waiting_for or "–", style="yellow" if status.waiting_for else "dim")
            table.add_row(status.part, status.phase, waiting, duration(time.time() - status.since))
        return table

    def _print_lines(self, fresh: list[dict[str, Any]], parts: Mapping[str, Status]) -> None:
        for row in fresh:
            numbers = "  ".join(f"{label} {value}" for label, value in self._numbers(row))
            done = int(row["step"]) + 1
            self.say(f"step {done}/{self._config.steps}  {numbers}  left {self._remaining(done)}")
        now = time.time()
        if not fresh and now - self._last_line >= HEARTBEAT_S:
            self.say(parts_line(parts, now))
        if fresh or now - self._last_line >= HEARTBEAT_S:
            self._last_line = now


def parts_line(parts: Mapping[str, Status], now: float) -> str:
    """One line that says what each part does and what it waits for."""
    if not parts:
        return "no part has reported yet"
    words = []
    for status in parts.values():
        what = f"{status.phase}, waits for {status.waiting_for}" if status.waiting_for else status.phase
        words.append(f"{status.part}: {what} ({duration(now - status.since)})")
    return "  |  ".join(words)
