"""Measured figures, kept with the conditions under which they were measured: docs/benchmarks/NAME.json.

A file is a list of rows {figure, value, unit, goal, passed, conditions, command, commit}; a figure measured again
replaces its row and keeps its place. `docs/benchmarks.md` is made from the files by `tools/render_benchmarks.py`, which
`write_rows` runs too.

    from tools.benchmark_rows import Row, write_rows
    write_rows("trainer", [Row("trainer_tokens_ratio", 0.97, "", ">= 0.95", "tiny MoE, EP=2, 16 sequences")])
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import operator
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tools import render_benchmarks

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "benchmarks"

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_GOAL = re.compile(r"^(<=|>=|<|>)\s*([-+0-9.eE]+)$")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure.

    value: a number, or several (one per seed, say). unit: "s", "tokens/s", "points", "" for a ratio. goal: such as
    ">= 0.95", which every value must meet, or "" for a figure that is only reported. conditions: what the machine's
    facts do not say (sizes, layout, load). command: how to measure it again; empty takes this process's command line.
    passed: follows from a goal that is a comparison; must be given for a goal in words.
    """

    figure: str
    value: float | list[float]
    unit: str = ""
    goal: str = ""
    conditions: str = ""
    command: str = ""
    passed: bool | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_.-]*", self.figure):
            raise ValueError(f"figure {self.figure!r}: a name is lower-case words joined by _, with digits, . and -")
        values = self.values
        if not values or not all(math.isfinite(value) for value in values):
            raise ValueError(
                f"figure {self.figure}: value {self.value!r} is not finite; report it in the text instead"
            )
        object.__setattr__(self, "goal", self.goal.replace("≥", ">=").replace("≤", "<="))
        found = _GOAL.match(self.goal)
        if found is None:
            if bool(self.goal) != (self.passed is not None):
                raise ValueError(
                    f"figure {self.figure}: goal {self.goal!r} with passed {self.passed}; a goal is a comparison such "
                    "as '>= 0.95', or words together with passed"
                )
            return
        met = all(_COMPARISONS[found[1]](value, float(found[2])) for value in values)
        if self.passed is not None and self.passed != met:
            raise ValueError(
                f"figure {self.figure}: passed {self.passed}, but {self.value} {self.goal} is {met}"
            )
        object.__setattr__(self, "passed", met)

    @property
    def values(self) -> list[float]:
        """The value or values as a list."""
        return [float(v) for v in (self.value if isinstance(self.value, list) else [self.value])]


def machine() -> str:
    """Cores, memory and versions of this machine, in words."""
    memory = psutil.virtual_memory().total / 2**30
    words = [
        f"{len(os.sched_getaffinity(0))} cores",
        f"{memory:.0f} GiB",
        f"Python {platform.python_version()}",
    ]
    for package in ("torch", "sglang", "megatron-core"):
        try:
            words.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            words.append(f"no {package}")
    return ", ".join(words)


def commit() -> str:
    """Short hash of the code measured, with -dirty when tracked files other than the figures were changed."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    changed = git(
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        ":!docs/benchmarks",
        ":!docs/benchmarks.md",
    )
    return f"{head}-dirty" if changed else head


def _command_line() -> str:
    """This process's command as a person would type it at the root of the repository."""
    script = Path(sys.argv[0]).absolute()
    if script.is_relative_to(ROOT):
        module = ".".join(script.relative_to(ROOT).with_suffix("").parts)
        return shlex.join(["python", "-m", module, *sys.argv[1:]])
    return shlex.join(["python", str(script), *sys.argv[1:]])


def write_rows(name: str, rows: Sequence[Row | Mapping[str, Any]], folder: Path = FOLDER) -> Path:
    """Write rows (or mappings with the fields of `Row`) into NAME.json, replacing those of the same figure.

    Returns the file. Raises ValueError when a row is not valid or a figure is given twice; nothing is written then.
    """
    checked = [row if isinstance(row, Row) else Row(**row) for row in rows]
    figures = [row.figure for row in checked]
    if len(set(figures)) != len(figures):
        raise ValueError(f"a figure is given twice: {', '.join(figures)}")
    path = folder / f"{name}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    merged = {row["figure"]: row for row in kept}
    facts, measured_at = machine(), commit()
    for row in checked:
        conditions = f"{row.conditions}; {facts}" if row.conditions else facts
        command = row.command or _command_line()
        merged[row.figure] = {
            **asdict(row), "conditions": conditions, "command": command, "commit": measured_at
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(merged.values()), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    render_benchmarks.write_page(folder)
    return path
