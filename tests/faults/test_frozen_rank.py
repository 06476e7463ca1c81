"""A real run whose trainer rank is stopped for good goes on without it: the rank is named, killed and started again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from megatron_async.config import load
from tests.faults.chaos_run import write_config
from tests.faults.test_graceful_stop import DEADLINE_S, launched, steps_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_stopped_rank_of_a_real_run_is_ended_and_the_run_finishes(smallest_checkpoint: Path, tmp_path: Path) -> None:
    path = write_config(
        tmp_path, smallest_checkpoint, steps=6, engines={"count": 1}, checkpoint={"every": 2}, layout={"world_size": 2},
        evaluation={"tasks": 2}, trainer={"deadline_s": 130, "micro_batch_tokens": 2048, "health_deadline_s": 20},
    )  # fmt: skip
    config = load(path, [])
    with launched(path, stand_in=False) as job:
        wait_until(lambda: sum(step.state == "committed" for step in steps_of(config)) >= 2, job)
        ranks = sorted(int(file.name) for file in (config.run_path / "logs" / "trainer.beats").iterdir())
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)
        output, _ = job.communicate(timeout=2 * DEADLINE_S)
    assert job.returncode == 0, output
    (row,) = [json.loads(line) for line in (config.run_path / "restarts.jsonl").read_text().splitlines()]
    assert row["part"] == "trainer" and f"its process {ranks[1]} gave no sign of life" in row["ending"]
    assert [step.state for step in steps_of(config)] == ["committed"] * 6
    assert "Current thread" in (config.run_path / "logs" / "trainer.log").read_text()  # the stacks of the other rank
