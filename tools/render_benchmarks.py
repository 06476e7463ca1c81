"""Makes docs/benchmarks.md from docs/benchmarks/*.json. `--check` only says whether the page is current."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
PAGE = FOLDER.parent / "benchmarks.md"

_HEAD = """# Benchmarks

Made from `docs/benchmarks/*.json` by `python -m tools.render_benchmarks`; do not edit. Every figure was measured by the
command beside it, at the commit and under the conditions named. No figure was measured on a GPU unless its conditions
say so.
"""


def _value_text(value: float | list[float]) -> str:
    values = value if isinstance(value, list) else [value]
    return ", ".join(f"{item:.4g}" for item in values)


def _verdict(passed: bool | None) -> str:
    return "–" if passed is None else "met" if passed else "**not met**"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _section(name: str, rows: list[dict[str, Any]], images: list[Path]) -> str:
    lines = [f"## {name}", "", "| figure | value | unit | goal | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [
            f"`{row['figure']}`",
            _value_text(row["value"]),
            row["unit"],
            row["goal"] or "–",
            _verdict(row["passed"]),
        ]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    lines.append("")
    conditions: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        conditions.setdefault((row["conditions"], row["command"], row["commit"]), []).append(row["figure"])
    for (condition, command, commit), figures in conditions.items():
        lines.append(
            f"- {', '.join(f'`{figure}`' for figure in figures)}: {condition}; `{command}` at `{commit}`"
        )
    lines += ["", *(f"![{image.stem}](benchmarks/{image.name})\n" for image in images)]
    return "\n".join(lines)


def _extra(name: str, folder: Path) -> str:
    """Texts that belong to this benchmark (NAME.md, NAME_*.md): tables, and what the numbers mean."""
    files = [folder / f"{name}.md", *sorted(folder.glob(f"{name}_*.md"))]
    texts = [file.read_text(encoding="utf-8").rstrip() + "\n" for file in files if file.is_file()]
    return "\n".join(texts)


def render(folder: Path = FOLDER) -> str:
    """The page as Markdown: a section for each file, with NAME.md, NAME_*.md and NAME*.png where they exist."""
    sections = [_HEAD]
    for path in sorted(folder.glob("*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise ValueError(f"{path} is no list of rows; write it with tools/benchmark_rows.py")
        images = sorted(folder.glob(f"{path.stem}*.png"))
        sections.append(_section(path.stem, rows, images) + _extra(path.stem, folder))
    if len(sections) == 1:
        sections.append("Nothing has been measured yet.\n")
    return "\n".join(sections)


def write_page(folder: Path = FOLDER) -> Path:
    """Write the page beside the folder of figures; returns it."""
    page = folder.parent / PAGE.name
    page.write_text(render(folder), encoding="utf-8")
    return page


def main(arguments: list[str]) -> int:
    """Write the page, or with --check compare; returns the exit code."""
    if "--check" not in arguments:
        write_page()
        return 0
    current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == render()
    if not current:
        print(f"{PAGE} is not current: run python -m tools.render_benchmarks", file=sys.stderr)
    return 0 if current else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
