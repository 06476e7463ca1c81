"""`megatron-async evaluate --checkpoint`: engines come, play and go, and the results have a folder of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_async import cli
from megatron_async.rollout.environments.desk_checkpoint import write_tiny_checkpoint

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_a_checkpoint_is_evaluated_and_no_engine_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_checkpoint(tmp_path / "model", seed=0)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"name: r\nrun_dir: {tmp_path}\nmodel: {{path: nowhere, dtype: float32}}\nlayout: {{world_size: 1}}\n"
        "environment: {name: desk}\nrollout: {max_turns: 4, max_new_tokens: 16, max_tokens: 512}\n"
        "engines: {max_total_tokens: 8192, mem_fraction_static: 0.1}\n"
        "evaluation: {tasks: 6, samples_per_task: 2}\n"
    )
    folder = tmp_path / "out"
    arguments = ["--config", str(config), "--checkpoint", str(tmp_path / "model"), "--folder", str(folder)]
    assert cli.main(["evaluate", *arguments]) == 0
    written = json.loads((folder / "evaluation.json").read_text())
    assert (written["tasks"], written["episodes"], written["versions"]) == (6, 12, [0, 0])
    assert "| k | pass^k | 95 % interval | pass@k |" in capsys.readouterr().out
    assert not (folder / "under_way").exists()
    assert not (tmp_path / "r").exists(), "a checkpoint's evaluation leaves a run alone"
    assert "Uvicorn running" in (folder / "logs/engine_0.log").read_text()
