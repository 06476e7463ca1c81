"""One run on three machines: two trainers and one with engines, each a `launch --node N` of its own over one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_async.observe import read_evaluations, read_metrics
from sglang_bridge.server import claim_port
from tests.live.test_main_job import STEPS, processes_of, write_config
from tools.benchmark_rows import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(config: Path, number: int, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megatron_async", "launch", "--config", str(config), "--address", "127.0.0.1"]
    with output.open("wb") as log:
        return subprocess.Popen(
            [*command, "--node", str(number)], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip


def start_all(folder: Path, checkpoint: Path, **changes: object) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
    cluster = {"engine_nodes": 1, "rendezvous_port": claim_port("127.0.0.1", 0), "join_deadline_s": 120}
    config = write_config(
        folder, checkpoint, **{"trainer": {"deadline_s": 620, "nodes": 2}, "cluster": cluster, **changes}
    )
    outputs = [folder / f"machine_{number}.log" for number in range(3)]
    # The others first: they wait for the one that leads.
    jobs = {number: start(config, number, outputs[number]) for number in (2, 1, 0)}
    return [jobs[number] for number in range(3)], outputs


def end(jobs: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in processes_of(folder):
        process.kill()
    for job in jobs:
        job.wait(30)


def test_three_machines_train_publish_and_end_together(checkpoint: Path, tmp_path: Path) -> None:
    jobs, outputs = start_all(tmp_path, checkpoint)
    try:
        codes = [job.wait(400) for job in jobs]
        left = processes_of(tmp_path)
    finally:
        end(jobs, tmp_path)
    assert codes == [0, 0, 0], [output.read_text()[-3000:] for output in outputs]
    assert left == []
    run = tmp_path / "runs" / "job"
    assert [row["version"] for row in read_metrics(run)] == list(range(1, STEPS + 1))
    assert read_evaluations(run)[1]["versions"] == [STEPS, STEPS]
    assert len(json.loads((run / "engines.json").read_text())["engines"]) == 1
    assert (run / "logs" / "trainer_1.log").exists()


def test_a_machine_that_is_killed_ends_the_run_with_its_reason(checkpoint: Path, tmp_path: Path) -> None:
    """SIGTERM to the engines' machine: it says so, and the first one ends the run and names it."""
    jobs, outputs = start_all(tmp_path, checkpoint, steps=1000)
    try:
        deadline = time.monotonic() + 300
        while len(read_metrics(tmp_path / "runs" / "job")) < 1:
            assert all(job.poll() is None for job in jobs), [output.read_text()[-3000:] for output in outputs]
            assert time.monotonic() < deadline, "no step within 300 s"
            time.sleep(0.5)
        jobs[2].terminate()
        codes = [job.wait(60) for job in jobs]
        left = processes_of(tmp_path)
    finally:
        end(jobs, tmp_path)
    assert codes[2] == 130
    assert codes[0] == 2
    assert codes[1] == 2
    # Whichever is noticed first: the machine's word, or a part that missed its engine.
    reason = outputs[0].read_text()
    assert "machine 2 (127.0.0.1) failed: StopRequested: SIGTERM" in reason or "127.0.0.1" in reason, reason
    assert left == []
