"""Every way of cutting the model gives transformers' log-probs, gradients and steps, and exports the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import LaunchError, launch
from tests.engine_reference import write_reference

SCRIPT = Path(__file__).with_name("engine_ranks.py")
# Four ranks; what tensor, context and pipeline parallel leave over is data parallel.
LAYOUTS = (
    "dense:tp2",
    "moe",
    "moe:tp2:etp2",
    "moe:tp2:ep2",
    "moe:ep4",
    "moe:tp2:ep2:etp2",
    "dense:pp2:tp2",
    "moe:pp2:vpp2:ep2",
    "moe:cp2:tp2:ep2",
)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("layouts")
    for kind in ("dense", "moe"):
        (directory / kind).mkdir()
        write_reference(directory / kind, kind)
    launch(SCRIPT, 4, str(directory), *LAYOUTS, logs=directory / "logs", timeout_s=240)
    return json.loads((directory / "findings.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_and_gradients_equal_transformers(findings: dict[str, Any], layout: str) -> None:
    """Field bug 24: neither micro-batches nor data, context or pipeline parallel divide once more."""
    found = findings[layout]
    assert found["token_error"] <= 2e-5
    assert found["gradient_error"] <= 1e-5, found["gradient_tensor"]
    # Sums over about a hundred tokens in fp32.
    assert found["loss_error"] <= 1e-5
    assert found["norm_error"] <= 1e-5
    # The training pass sees what the scoring pass sees: same products, same order.
    assert found["train_logprob_error"] == 0.0
    assert found["tokens_counted"] == 103


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_equal_torch_adamw(findings: dict[str, Any], layout: str) -> None:
    # Three fp32 Adam steps with clipping, on the distributed optimiser.
    assert findings[layout]["step_error"] <= 1e-5, findings[layout]["step_tensor"]
    assert findings[layout]["step_norm_error"] <= 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_and_exported_bits_are_identical(findings: dict[str, Any], layout: str) -> None:
    """Field bug 43: expert shards are gathered over expert-tensor-parallel ranks, for one."""
    assert findings[layout]["export_differs"] == []
    assert findings[layout]["exported"] == {"dense": 46, "moe": 77}[layout.partition(":")[0]]


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "tp2" in layout.split(":")])
def test_sharded_vocabulary_equals_float64(findings: dict[str, Any], layout: str) -> None:
    # fp32 sums over 96 terms; bf16 gradients below 4 are rounded once, by half of 2^-6.
    assert findings[layout]["vocabulary"]["float32"] <= 1e-5
    assert findings[layout]["vocabulary"]["bfloat16"] <= 8e-3


def test_a_failing_rank_ends_the_launch_and_shows_its_output(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit('rank one gave up')\ntime.sleep(60)\n"
    )
    with pytest.raises(LaunchError, match=r"(?s)rank 1 exited with 1.*rank one gave up"):
        launch(script, 2, logs=tmp_path / "logs", timeout_s=30)


def test_a_rank_that_hangs_meets_the_deadline(tmp_path: Path) -> None:
    script = tmp_path / "hanging.py"
    script.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(LaunchError, match=r"rank\(s\) \[0, 1\] did not finish \(deadline 1 s\)"):
        launch(script, 2, logs=tmp_path / "logs", timeout_s=1)
