"""Rows, metrics, status and timeline: what is written can be read at any moment, also after a kill in between."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_async.observe import (
    MetricsWriter,
    RunFiles,
    StatusWriter,
    Timeline,
    append_evaluation,
    gap_histogram,
    read_evaluations,
    read_metrics,
    read_status,
    read_timeline,
)
from megatron_async.observe.rows import RowTail, RowWriter, read_rows
from megatron_async.observe.timeline import Interval, merged, window_of_step, within


def test_rows_come_back_and_a_torn_line_is_no_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    with RowWriter(path) as rows:
        rows.append({"a": 1})
        rows.append({"a": np.float32(0.5), "b": [np.int64(2), math.nan], "c": math.inf})
    with path.open("ab") as file:
        file.write(b'{"a": 3, "b"')  # the writer was killed here
    assert read_rows(path) == [{"a": 1}, {"a": 0.5, "b": [2, None], "c": "inf"}]
    with RowWriter(path) as rows:
        rows.append({"a": 4})
    assert [row["a"] for row in read_rows(path)] == [1, 0.5, 4]


def test_damage_inside_a_file_is_not_taken_for_a_torn_write(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1\n{"a": 2}\n')
    with pytest.raises(json.JSONDecodeError):
        read_rows(path)


def test_appenders_at_the_same_time_do_not_mix(tmp_path):
    path = tmp_path / "rows.jsonl"

    def append(part: int) -> None:
        with RowWriter(path) as rows:
            for index in range(200):
                rows.append({"part": part, "index": index, "text": "x" * (part * 50)})

    threads = [threading.Thread(target=append, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = read_rows(path)
    assert len(rows) == 800
    for part in range(4):
        assert [row["index"] for row in rows if row["part"] == part] == list(range(200))


def test_tail_gives_each_complete_row_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    tail = RowTail(path)
    assert tail.new() == []
    path.write_bytes(b'{"a": 1}\n{"a": ')
    assert tail.new() == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b"2}\n")
    assert tail.new() == [{"a": 2}]
    assert tail.new() == []
    path.write_bytes(b'{"a": 9}\n')  # started anew
    assert tail.new() == [{"a": 9}]


def test_metrics_of_a_repeated_step_are_the_later_ones(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.log(0, {"loss": 1.0})
        metrics.log(1, {"loss": 2.0, "version_gap/tokens/0": 30, "version_gap/tokens/2": 10})
    with MetricsWriter(tmp_path) as metrics:
        metrics.log(1, {"loss": 3.0, "version_gap/tokens/0": 5})
        metrics.log(2, {"loss": 4.0, "version_gap/tokens/10": 1, "version_gap/tokens/2": 4})
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 1.0), (1, 3.0), (2, 4.0)]
    assert gap_histogram(rows) == {0: 5, 2: 4, 10: 1}
    with MetricsWriter(tmp_path) as metrics, pytest.raises(ValueError, match="'step' and 'time'"):
        metrics.log(3, {"step": 3})


def test_tensorboard_events_hold_the_same_numbers(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True) as metrics:
        metrics.log(7, {"reward/mean": 0.25, "note": "text", "list": [1, 2], "nothing": None})
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = RunFiles(tmp_path).tensorboard.iterdir()
    values = [
        (event.step, value.tag, value.simple_value or value.tensor.float_val[0])
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    assert values == [(7, "reward/mean", 0.25)]


def test_evaluations_need_their_fields(tmp_path):
    row = {"step": 0, "version": 0, "success_rate": 0.5, "stderr": 0.05}
    append_evaluation(tmp_path, row)
    append_evaluation(tmp_path, {**row, "step": 5, "success_rate": 0.7})
    assert [found["success_rate"] for found in read_evaluations(tmp_path)] == [0.5, 0.7]
    with pytest.raises(ValueError, match="lacks stderr"):
        append_evaluation(tmp_path, {key: row[key] for key in ("step", "version", "success_rate")})


def test_status_says_since_when(tmp_path):
    status = StatusWriter(tmp_path, "trainer", interval_s=60.0)
    status.set("train", counters={"step": 3})
    since = read_status(tmp_path)["trainer"].since
    with status.waiting("batch 4"):
        waiting = read_status(tmp_path)["trainer"]
        assert (waiting.phase, waiting.waiting_for, waiting.counters) == ("train", "batch 4", {"step": 3})
        assert waiting.since >= since
    status.count(step=4)
    assert read_status(tmp_path)["trainer"].counters == {"step": 3}, (
        "counters alone are written at most every interval"
    )
    status.close()
    final = read_status(tmp_path)["trainer"]
    assert (final.phase, final.waiting_for, final.counters) == ("finished", "", {"step": 4})


def test_since_stays_while_the_phase_stays(tmp_path):
    status = StatusWriter(tmp_path, "rollout", interval_s=0.0)
    status.set("running")
    since = read_status(tmp_path)["rollout"].since
    time.sleep(0.02)
    status.set("running", counters={"finished": 1})
    later = read_status(tmp_path)["rollout"]
    assert later.since == since
    assert later.time > since


def test_a_reader_never_sees_half_a_status(tmp_path):
    status = StatusWriter(tmp_path, "engine", interval_s=0.0)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            status.set("running", "x" * 5000, {"n": 1.0})
            status.set("running", "", {"n": 2.0})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [read_status(tmp_path)["engine"].waiting_for for _ in range(300)]
    finally:
        stop.set()
        writer.join()
    assert set(seen) <= {"", "x" * 5000}
    assert not list(RunFiles(tmp_path).status.glob("*.tmp"))


def test_timeline_measures_and_records_also_when_a_stage_raises(tmp_path):
    timeline = Timeline(tmp_path, "trainer")
    with timeline.stage("score", 0):
        time.sleep(0.03)
    with pytest.raises(RuntimeError), timeline.stage("train", 0):
        raise RuntimeError("stop")
    with timeline.stage("score", 1):
        pass
    timeline.close()
    intervals = read_timeline(tmp_path)
    assert [(i.part, i.stage, i.step) for i in intervals] == [
        ("trainer", "score", 0),
        ("trainer", "train", 0),
        ("trainer", "score", 1),
    ]
    assert intervals[0].seconds >= 0.03
    seconds = timeline.take_seconds()
    assert seconds["score"] == pytest.approx(intervals[0].seconds + intervals[2].seconds, abs=1e-5)
    assert timeline.take_seconds() == {}


def test_other_ranks_only_measure(tmp_path):
    timeline = Timeline(None, "trainer")
    with timeline.stage("train", 0):
        pass
    assert set(timeline.take_seconds()) == {"train"}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="before it starts"):
        timeline.record("train", 0, 2.0, 1.0)


def test_intervals_are_merged_and_cut():
    intervals = [
        Interval("rollout", "episode", 0, 0.0, 2.0),
        Interval("rollout", "episode", 0, 1.0, 3.0),
        Interval("rollout", "episode", 1, 5.0, 6.0),
        Interval("trainer", "train", 1, 2.5, 5.5),
    ]
    assert merged(intervals[:3]) == [(0.0, 3.0), (5.0, 6.0)]
    assert window_of_step(intervals, 1) == (2.5, 5.5)
    assert window_of_step(intervals, 0) is None
    cut = within(intervals, 2.5, 5.5)
    assert [(i.part, i.start, i.end) for i in cut] == [
        ("rollout", 2.5, 3.0),
        ("rollout", 5.0, 5.5),
        ("trainer", 2.5, 5.5),
    ]


def test_all_files_lie_under_the_run():
    files = RunFiles(Path("runs/x"))
    names = [name for name in dir(files) if isinstance(getattr(type(files), name, None), property)]
    assert len(names) >= 9
    assert all(getattr(files, name).is_relative_to("runs/x") for name in names)
