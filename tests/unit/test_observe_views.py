"""Progress, report and drawings, from the files of a made-up run whose numbers are known."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async.config import dump, load
from megatron_async.errors import UserError
from megatron_async.observe import (
    MetricsWriter,
    RunFiles,
    StatusWriter,
    Timeline,
    append_evaluation,
    read_timeline,
)
from megatron_async.observe import progress as progress_module
from megatron_async.observe.drawing import text_timeline, typical_step
from megatron_async.observe.progress import Progress, Rate, duration, short_number
from megatron_async.observe.report import Report, write_report
from tests.unit.configs import write_config

T0 = 1000.0


def make_run(tmp_path: Path, steps: int = 4) -> Path:
    """A run whose step k starts at T0 + 10 k: 4 s waiting, 6 s training; the rollout is busy all the time."""
    config = load(write_config(tmp_path, steps=steps))
    run = config.run_path
    trainer, rollout = Timeline(run, "trainer"), Timeline(run, "rollout")
    RunFiles(run).config.write_text(dump(config))
    with MetricsWriter(run) as metrics:
        for step in range(steps):
            start = T0 + 10 * step
            trainer.record("wait_batch", step, start, start + 4)
            trainer.record("train", step, start + 4, start + 10)
            rollout.record("episode", step, start - 1, start + 9.5)
            metrics.log(
                step,
                {
                    "reward/mean": 0.5 + step / 10, "version": step + 1, "version_gap/mean": 0.75,
                    "version_gap/tokens/0": 100, "version_gap/tokens/1": 300, "seconds/wait_batch": 4.0,
                    "seconds/train": 6.0, "seconds/train/forward": 2.0, "seconds/step": 10.0,
                    "tokens_per_second/train": 1000.0,
                },
            )  # fmt: skip
    append_evaluation(run, {"step": 0, "version": 0, "success_rate": 0.5, "stderr": 0.05, "tasks": 100})
    append_evaluation(run, {"step": 4, "version": 4, "success_rate": 0.8, "stderr": 0.04, "tasks": 100})
    return run


def test_report_shows_what_the_files_hold(tmp_path):
    run = make_run(tmp_path)
    report = Report.from_folder(run)
    assert report.gain_points == pytest.approx(30.0)
    assert report.version_gap_mean == 0.75
    assert report.version_gap_histogram == {0: 400, 1: 1200}
    assert report.seconds_by_stage == {"wait_batch": 4.0, "train": 6.0, "train/forward": 2.0}
    text = write_report(run)
    for words in (
        "50.0 % ± 5.0 (100 tasks)",
        "80.0 % ± 4.0",
        "+30.0 points",
        "75.0%",
        "6.000",
        "60%",
        "config.yaml",
        "reward, first and last 2 step(s) │ 0.550, 0.750",
    ):
        assert words in text, words
    assert RunFiles(run).report.read_text() == text
    assert RunFiles(run).timeline_image.read_bytes().startswith(b"\x89PNG")


def test_report_says_what_makes_the_success_incomparable(tmp_path):
    """Of each evaluation its own: only the second saw weights that were trained on its tasks."""
    run = make_run(tmp_path)
    RunFiles(run).evaluations.unlink()
    known = {"trainings": [{"kind": "warm start", "environment": "tau2", "about": {"split": "test"}, "tasks": 40}]}
    known |= {"evaluated": 40, "shared": 40, "unlisted": 0}
    labels = {"prompt": "own"}
    row = {"success_rate": 0.5, "stderr": 0.05, "tasks": 40, "version": 0}
    append_evaluation(run, {**row, "step": 0, "labels": labels, "subject": {"training": {}}})
    labels = {**labels, "trained_on_evaluation_tasks": "40"}
    append_evaluation(run, {**row, "step": 4, "labels": labels, "subject": {"training": known}})
    text = " ".join(word for word in write_report(run).split() if word != "│")
    assert "not comparable, before prompt: own. trained on, before Unknown what it was trained on." in text
    after = "not comparable, after prompt: own. 40 of the evaluated tasks were among the training tasks: no benchmark"
    assert after in text
    assert "warm start on tau2, split test (40 tasks)" in text


def test_report_of_a_run_that_has_just_begun_shows_dashes(tmp_path):
    config = load(write_config(tmp_path))
    config.run_path.mkdir(parents=True)
    RunFiles(config.run_path).config.write_text(dump(config))
    text = write_report(config.run_path)
    assert "held-out success before" in text
    assert "–" in text
    assert not RunFiles(config.run_path).timeline_image.exists()


def test_report_of_no_run_or_an_unknown_step(tmp_path):
    with pytest.raises(UserError, match="not the folder of a run"):
        write_report(tmp_path)
    run = make_run(tmp_path)
    with pytest.raises(UserError, match="no stage of the trainer for step 99; it has steps: 0 to 3"):
        write_report(run, step=99)


def test_text_timeline_is_in_proportion(tmp_path):
    lines = text_timeline(read_timeline(make_run(tmp_path)), 1, width=10).splitlines()
    rows = {line.split("|")[0].strip(): line.split("|")[1] for line in lines[1:]}
    assert lines[0] == "step 1: 10.00 s"
    assert rows["trainer wait_batch"] == "████      "
    assert rows["trainer train"] == "    ██████"
    assert (
        rows["rollout episode"] == "██████████"
    )  # its own episode, and the next step's that began 1 s early


def test_typical_step_is_of_median_length_and_not_the_first(tmp_path):
    timeline = Timeline(tmp_path, "trainer")
    for step, seconds in enumerate([50.0, 1.0, 3.0, 2.0]):
        timeline.record("train", step, T0, T0 + seconds)
    assert typical_step(read_timeline(tmp_path)) == 3
    assert typical_step([]) is None


def plain(tmp_path: Path, **sections) -> tuple[Progress, io.StringIO, Path]:
    config = load(write_config(tmp_path, steps=10, **sections))
    output = io.StringIO()
    return Progress(config, Console(file=output, width=200)), output, config.run_path


def test_plain_progress_prints_a_line_per_step(tmp_path):
    progress, output, run = plain(tmp_path, observe={"progress": "plain"})
    row = {"reward/mean": 0.5, "version": 3, "version_gap/mean": 1.25, "seconds/step": 2.0}
    with progress, MetricsWriter(run) as metrics:
        progress.refresh()
        metrics.log(0, row)
        metrics.log(1, {**row, "reward/mean": 1.0})
        progress.refresh()
        progress.refresh()
    lines = output.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("step 2/10")
    for words in ("reward 1 (last 2: 0.750)", "version gap 1.250", "left 16 s", "training – tokens/s"):
        assert words in lines[1], lines[1]


def test_plain_progress_says_who_waits_for_what_when_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "HEARTBEAT_S", 0.0)
    progress, output, run = plain(tmp_path, observe={"progress": "plain"})
    StatusWriter(run, "trainer").set("wait_batch", "12 of 32 trajectories")
    StatusWriter(run, "rollout").set("running")
    with progress:
        progress.refresh()
    assert (
        "rollout: running (0 s)  |  trainer: wait_batch, waits for 12 of 32 trajectories (0 s)"
        in output.getvalue()
    )


def test_rich_progress_shows_parts_and_falls_back_where_there_is_no_terminal(tmp_path):
    config = load(write_config(tmp_path, steps=10))
    StatusWriter(config.run_path, "trainer").set("wait_batch", "batch 3")
    with MetricsWriter(config.run_path) as metrics:
        metrics.log(0, {"reward/mean": 0.5, "seconds/step": 2.0})
    output = io.StringIO()
    with Progress(config, Console(file=output, width=120, force_terminal=True)) as progress:
        progress.refresh()
    assert "batch 3" in output.getvalue()
    assert "step 1/10" in output.getvalue()
    piped = io.StringIO()
    with Progress(config, Console(file=piped, width=200)) as progress:
        progress.refresh()
    assert piped.getvalue().startswith("step 1/10")


def test_switched_off_progress_is_silent(tmp_path):
    progress, output, _ = plain(tmp_path, observe={"progress": "off"})
    with progress:
        progress.refresh()
        progress.say("hello")
    assert output.getvalue() == ""


def test_generation_rate_is_over_a_window_and_survives_a_restart():
    rate = Rate(window_s=10.0)
    assert rate.add(0.0, 0.0) is None
    assert rate.add(5.0, 500.0) == 100.0
    assert rate.add(20.0, 3500.0) == pytest.approx(200.0)  # only the last reading before the window is kept
    assert rate.add(21.0, 10.0) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.5, "0.500"),
        (12.34, "12.3"),
        (9999, "9999"),
        (12345, "12.3k"),
        (2.5e6, "2.5M"),
        (3, "3"),
    ],
)
def test_short_numbers(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.4, "3 s"), (59.7, "1:00"), (187, "3:07"), (3765, "1:02:45"), (-1, "0 s")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
