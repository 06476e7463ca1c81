"""The main job end to end: real Megatron ranks, a real SGLang server, a real rollout process; small and short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from megatron_async import training_record
from megatron_async.bank import Bank
from megatron_async.observe import read_evaluations, read_metrics
from tools.benchmark_rows import ROOT

STEPS = 3


def write_config(folder: Path, checkpoint: Path, **changes: object) -> Path:
    config = {
        "name": "job",
        "run_dir": str(folder / "runs"),
        "steps": STEPS,
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "layout": {"world_size": 2, "expert_model_parallel_size": 2},
        "trainer": {"deadline_s": 620},
        "optimizer": {"lr": 1e-3},
        "batch": {"groups": 3, "group_size": 4},
        "objective": {"mask_low": 0.5, "mask_high": 2.0},
        "advantage": {"drop_zero_variance_groups": False},
        "rollout": {"max_staleness": 2, "concurrency": 12, "max_turns": 2, "max_new_tokens": 12, "max_tokens": 256},
        "engines": {"mem_fraction_static": 0.1, "max_total_tokens": 32768},
        "environment": {"name": "tests.live.alternating_tasks:build"},
        "evaluation": {"tasks": 4},
        "observe": {"progress": "plain"},
        **changes,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(config: Path) -> subprocess.Popen[str]:
    """`launch` in a session of its own, so that a signal reaches it alone, as a terminal's Ctrl-C would."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_async", "launch", "--config", str(config)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def processes_of(marker: Path) -> list[psutil.Process]:
    """Processes whose command line names the run's own temporary folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(marker) in line and process.pid != os.getpid():
            found.append(process)
    return found


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was launched and ended by itself; its old log-probs come from the snapshot history."""
    folder = tmp_path_factory.mktemp("job")
    objective = {"anchor": "snapshot", "mask_low": 0.5, "mask_high": 2.0}
    job = start(write_config(folder, checkpoint, objective=objective))
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output
    assert "held-out success before" in output
    assert processes_of(folder) == []
    return folder / "runs" / "job"


def test_every_step_trained_and_the_gap_is_bounded(finished: Path) -> None:
    rows = read_metrics(finished)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["batch/trajectories"] == 12 for row in rows)
    assert max(row["version_gap/max"] for row in rows) <= 2
    assert all(row["objective/staleness/seconds_mean"] > 0 for row in rows)
    assert sum(row["publish/bytes"] for row in rows) > 0


def test_engine_noise_at_gap_zero_is_rounding(finished: Path) -> None:
    """Same version, two engines, fp32: mean |log r_d| <= 1e-5; the first batch has only gap 0."""
    first = read_metrics(finished)[0]
    assert first["version_gap/max"] == 0
    assert 0 < first["objective/engine_noise"] <= 1e-5


def test_old_logprobs_are_exact_at_every_gap(finished: Path) -> None:
    """At this learning rate the policy moves by |log ratio| of about 0.5 a step; the exact anchor sees none of it."""
    rows = read_metrics(finished)
    assert rows[-1]["version_gap/max"] >= 1
    assert all(row["objective/anchor/exact"] == 1.0 for row in rows)
    # fp32 rounding of two engines, as at gap 0.
    assert all(row["objective/log_discrepancy/mean_abs"] <= 1e-5 for row in rows)
    stale = [row for row in rows if row["version_gap/min"] >= 1]
    assert all(row["objective/log_staleness/mean_abs"] >= 1e-2 for row in stale)
    assert all(row["old_logits/shards_per_trajectory"] >= 1 for row in rows)
    assert rows[-1]["snapshots/versions"] <= 1 + 2
    for rank in ("rank_0000", "rank_0001"):
        assert (finished / "snapshots" / rank / "manifest.json").exists()


def test_versions_steps_and_trajectories_are_in_the_bank(finished: Path) -> None:
    with Bank.open(f"sqlite:///{finished / 'bank.sqlite'}") as bank:
        counts, steps = bank.counts(), bank.steps()
        versions = [(version.version, version.parent) for version in bank.versions()]
    assert versions == [(0, None), (1, 0), (2, 1), (3, 2)]
    assert [step.step for step in steps] == [0, 1, 2]
    assert counts["trained"] == 12 * STEPS
    assert counts["reserved"] == 0


def test_evaluations_before_and_after_saw_the_right_versions(finished: Path) -> None:
    before, after = read_evaluations(finished)
    assert before["versions"] == [0, 0]
    assert after["versions"] == [STEPS, STEPS]
    assert before["subject"]["training"] == {}
    (training,) = after["subject"]["training"]["trainings"]
    assert (training["kind"], training["run"]) == (training_record.REINFORCED, finished.name)
    assert training_record.read(finished / "checkpoint") == training_record.read(finished)


def test_the_final_checkpoint_loads_in_transformers_and_moved(finished: Path, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(finished / "checkpoint", dtype=torch.float32).state_dict()
    initial = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    assert trained.keys() == initial.keys()
    assert any(not torch.equal(trained[name], initial[name]) for name in trained)
    assert AutoTokenizer.from_pretrained(finished / "checkpoint").chat_template


def test_the_run_left_what_the_readme_lists(finished: Path) -> None:
    assert yaml.safe_load((finished / "config.yaml").read_text())["layout"]["expert_model_parallel_size"] == 2
    assert list((finished / "tensorboard").glob("events*"))
    assert (finished / "timeline.png").stat().st_size > 10_000
    assert json.loads((finished / "engines.json").read_text())["engines"][0]["url"].startswith("http://127.0.0.1:")


def test_a_second_run_of_the_same_name_is_refused(finished: Path) -> None:
    job = subprocess.run(
        [sys.executable, "-m", "megatron_async", "launch", "--config", str(finished / "config.yaml")],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert job.returncode == 2
    assert "already holds a run" in job.stderr
    assert "--fresh" in job.stderr


def test_ctrl_c_stops_every_part_within_ten_seconds(checkpoint: Path, tmp_path: Path) -> None:
    """Tensor parallel this time; the signal arrives while trainer, rollout and engine all run."""
    layout = {"world_size": 2, "tensor_model_parallel_size": 2}
    job = start(write_config(tmp_path, checkpoint, layout=layout, steps=1000))
    try:
        deadline = time.monotonic() + 300
        while len(read_metrics(tmp_path / "runs" / "job")) < 2:
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < deadline, "no step within 300 s"
            time.sleep(0.5)
        started = time.monotonic()
        os.kill(job.pid, signal.SIGINT)
        output, _ = job.communicate(timeout=60)
        stopped = time.monotonic() - started
    finally:
        for process in processes_of(tmp_path):
            process.kill()
    assert job.returncode == 130, output
    assert stopped <= 10.0
    assert processes_of(tmp_path) == []
