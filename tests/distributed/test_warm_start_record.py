"""A warm start as a user starts it: what it trained on lies beside the weights it exports, after what was before."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_async import cli, training_record
from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint


@pytest.mark.slow
def test_warm_starts_leave_what_they_trained_on_beside_their_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_checkpoint(model, 0, TinyShape())
    for name in ("first", "second"):
        file = tmp_path / f"{name}.yaml"
        sections = {
            "name": name, "run_dir": str(tmp_path / "runs"), "steps": 1, "model": {"path": str(model)},
            "environment": {"name": "desk", "options": {"pool": 7}}, "warm_start": {"demonstrations": 4},
            "batch": {"groups": 1, "group_size": 2}, "rollout": {"max_staleness": 1, "max_tokens": 1024},
        }  # fmt: skip
        file.write_text(yaml.safe_dump(sections))
        assert cli.main(["sft", "--config", str(file)]) == 0
        model = tmp_path / "runs" / name / "checkpoint"
    found = training_record.read(model)
    assert found is not None
    assert [(item.kind, item.run, item.tasks) for item in found] == [
        (training_record.WARM_START, "first", 7),
        (training_record.WARM_START, "second", 7),
    ]
    assert all(item.digests is not None and len(item.digests) == 7 for item in found)
