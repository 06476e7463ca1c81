"""Benchmark rows: goals decide, figures merge, the page is current."""

from __future__ import annotations

import json

import pytest

from tools import benchmark_rows, render_benchmarks
from tools.benchmark_rows import Row, write_rows


@pytest.mark.parametrize(
    ("value", "goal", "passed"),
    [
        (0.97, ">= 0.95", True),
        (0.94, "≥ 0.95", False),
        (3.0, "<= 3", True),
        (3.0, "< 3", False),
        ([21.0, 25.0, 19.9], ">= 20", False),
        ([21.0, 25.0, 20.0], ">= 20", True),
        (12.0, "", None),
    ],
)
def test_the_goal_decides(value, goal, passed):
    assert Row("figure", value, goal=goal).passed is passed


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"figure": "Not a name", "value": 1.0}, "lower-case"),
        ({"figure": "a", "value": float("nan")}, "not finite"),
        ({"figure": "a", "value": []}, "not finite"),
        ({"figure": "a", "value": 1.0, "goal": "fast"}, "words together with passed"),
        ({"figure": "a", "value": 1.0, "goal": ">= 2", "passed": True}, "passed True, but"),
    ],
)
def test_rows_that_mean_nothing_are_refused(arguments, word):
    with pytest.raises(ValueError, match=word):
        Row(**arguments)


def test_figures_merge_and_carry_conditions_command_and_commit(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks"
    monkeypatch.setattr("sys.argv", [str(benchmark_rows.ROOT / "tools" / "benchmark_x.py"), "--size", "a b"])
    write_rows("x", [Row("first", 1.0), Row("second", 2.0, "s", "<= 3", "tiny model")], folder)
    path = write_rows("x", [{"figure": "first", "value": 5.0, "unit": "tokens/s"}], folder)
    rows = json.loads(path.read_text())
    assert [(row["figure"], row["value"]) for row in rows] == [("first", 5.0), ("second", 2.0)]
    assert rows[1]["passed"] is True
    assert rows[1]["conditions"].startswith("tiny model; ")
    assert "cores" in rows[0]["conditions"]
    assert rows[0]["command"] == "python -m tools.benchmark_x --size 'a b'"
    assert rows[0]["commit"].removesuffix("-dirty").isalnum()
    with pytest.raises(ValueError, match="given twice"):
        write_rows("x", [Row("first", 1.0), Row("first", 2.0)], folder)
    assert json.loads(path.read_text()) == rows
    assert (folder.parent / "benchmarks.md").read_text() == render_benchmarks.render(folder)


def test_page_shows_values_verdicts_and_conditions(tmp_path):
    folder = tmp_path / "benchmarks"
    write_rows("x", [Row("slow", 5.0, "s", "<= 3", "a | b"), Row("seeds", [1.0, 2.5], "points")], folder)
    (folder / "x.md").write_text("What it means.")
    (folder / "x_curve.png").write_bytes(b"")
    page = render_benchmarks.render(folder)
    assert "| `slow` | 5 | s | <= 3 | **not met** |" in page
    assert "| `seeds` | 1, 2.5 | points | – | – |" in page
    assert "What it means." in page
    assert "![x_curve](benchmarks/x_curve.png)" in page
    assert "Nothing has been measured" in render_benchmarks.render(folder / "empty")


def test_benchmark_page_is_current():
    assert render_benchmarks.PAGE.read_text(encoding="utf-8") == render_benchmarks.render()
