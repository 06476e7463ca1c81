"""Every other way to old log-probs, end to end: the main job with each source, small and short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async.observe import read_metrics
from tests.live.test_main_job import STEPS, start, write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

Rows = list[dict[str, Any]]


def run(folder: Path, checkpoint: Path, anchor: str, **changes: object) -> tuple[Path, Rows]:
    objective = {"anchor": anchor, "mask_low": 0.5, "mask_high": 2.0}
    job = start(write_config(folder, checkpoint, objective=objective, evaluation={"tasks": 2}, **changes))
    output, _ = job.communicate(timeout=600)
    assert job.returncode == 0, output
    path = folder / "runs" / "job"
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(STEPS))
    return path, rows


def check_exact_at_every_gap(rows: Rows) -> None:
    """As in the test of the main job: the policy moves by about 0.5 a step, and the anchor sees none of it."""
    assert rows[-1]["version_gap/max"] >= 1
    assert all(row["objective/anchor/exact"] == 1.0 for row in rows)
    assert all(row["objective/log_discrepancy/mean_abs"] <= 1e-5 for row in rows)


def test_full_copies(checkpoint: Path, tmp_path: Path) -> None:
    _, rows = run(tmp_path, checkpoint, "snapshot", old_logits={"source": "snapshot_full"})
    check_exact_at_every_gap(rows)
    assert rows[-1]["snapshots/changed"] == 1.0


def test_interruption(checkpoint: Path, tmp_path: Path) -> None:
    _, rows = run(tmp_path, checkpoint, "interrupt")
    check_exact_at_every_gap(rows)
    assert all(row["interrupt/paused_seconds"] > 0 for row in rows)
    assert sum(row["interrupt/trajectories"] for row in rows) > 0


def test_dedicated_model(checkpoint: Path, tmp_path: Path) -> None:
    path, rows = run(tmp_path, checkpoint, "dedicated")
    check_exact_at_every_gap(rows)
    assert all(row["old_logits/sent_bytes"] > 0 for row in rows[1:])
    timeline = [json.loads(line) for line in (path / "timeline.jsonl").read_text().splitlines()]
    assert {row["stage"] for row in timeline if row["part"] == "scorer"} == {"follow", "score"}


def test_averaged_weights(checkpoint: Path, tmp_path: Path) -> None:
    """With the wide mask of this job an average over moving weights keeps few tokens active, so it restarts."""
    _, rows = run(tmp_path, checkpoint, "ewma")
    assert all(row["objective/anchor/approximate"] == 1.0 for row in rows)
    assert rows[0]["objective/log_discrepancy/mean_abs"] <= 1e-5  # before any update the average is the policy
    assert rows[-1]["objective/log_discrepancy/mean_abs"] >= 1e-3
    assert rows[-1]["ewma/resets"] >= 1
