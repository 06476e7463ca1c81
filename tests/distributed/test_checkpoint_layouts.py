"""Checkpoints under real layouts: bits back, training that goes on as if nothing had happened, resharding both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async.engine import checkpoint
from tests.distributed.launch import launch
from tests.engine_reference import make_model

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")
SAME = ("tp2:-:moe:tp2", "ep2:-:moe:ep2", "pp2:-:moe:pp2", "one:plain:moe")
TO_ONE = ("tp2:-:moe", "ep2:plain:moe", "pp2:-:moe", "bf16:bf16:moe")
FROM_ONE = ("one:-:moe:tp2", "one:-:moe:ep2", "one:-:moe:pp2:vpp2", "tp2:-:moe:pp2", "bf16:bf16+plain:moe")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two ranks, loaded by one, saved by one, loaded by two."""
    path = tmp_path_factory.mktemp("checkpoints")
    make_model("moe").save_pretrained(path / "moe" / "model")
    two = ("save:tp2:-:moe:tp2", "save:ep2:-:moe:ep2", "save:pp2:sync:moe:pp2", "save:bf16:bf16:moe")
    launch(SCRIPT, 2, str(path), *two, *(f"load:{job}" for job in SAME[:3]), logs=path / "logs2", timeout_s=240)
    one = ("save:one:plain:moe", *(f"load:{job}" for job in (SAME[3], *TO_ONE)))
    launch(SCRIPT, 1, str(path), *one, logs=path / "logs1", timeout_s=240)
    launch(SCRIPT, 2, str(path), *(f"load:{job}" for job in FROM_ONE), logs=path / "logs3", timeout_s=240)
    return path


def findings(directory: Path, job: str) -> dict[str, Any]:
    name, options, layout = job.split(":", 2)
    return json.loads((directory / f"{name}-{options}-{layout.replace(':', '_')}.json").read_text())


@pytest.mark.parametrize("job", SAME + TO_ONE + FROM_ONE)
def test_bits_come_back_under_any_layout(directory: Path, job: str) -> None:
    """Saved in the background while training went on: what was saved is the state at that moment."""
    found = findings(directory, job)
    assert found["tensors"] == 77
    assert found["loaded_differs"] == []
    assert found["average_differs"] == 0
    assert found["moved"]


@pytest.mark.parametrize("job", SAME)
def test_the_same_layout_goes_on_bit_for_bit(directory: Path, job: str) -> None:
    """Schedule, moments and step counts included: three more steps with warm-up, weight decay and clipping."""
    assert findings(directory, job)["continued_differs"] == []


@pytest.mark.parametrize("job", TO_ONE[:3] + FROM_ONE[:4])
def test_another_layout_goes_on_alike(directory: Path, job: str) -> None:
    found = findings(directory, job)
    # fp32 sums in another order; a lost step count or rate would show as 1e-2.
    assert found["continued_error"] <= 1e-6, found["continued_tensor"]


@pytest.mark.parametrize("job", SAME + TO_ONE + FROM_ONE)
def test_every_parameter_counts_its_own_steps(directory: Path, job: str) -> None:
    """Trap: one step tensor shared by all parameters is counted once for each of them."""
    found = findings(directory, job)
    assert found["counts"] == [2.0]
    assert found["count_tensors"] == found["parameters"] > 0


@pytest.mark.parametrize("name", ["tp2", "ep2", "one"])
def test_keys_do_not_depend_on_the_layout(directory: Path, name: str) -> None:
    """Traps: a prefix per inner optimiser (one without expert parallel, two with it), buckets instead of parameters."""
    from megatron.core import dist_checkpointing  # once the engine has prepared the platform

    shapes = {
        key: tuple(entry.global_shape)
        for key, entry in dist_checkpointing.load_tensors_metadata(str(directory / name / "weights")).items()
    }
    states = {key: shape for key, shape in shapes.items() if key.startswith("optimizer.")}
    assert not [key for key in states if "chained" in key or "bucket" in key or "dp_group" in key]
    model = {key: shape for key, shape in shapes.items() if not key.startswith("optimizer.")}
    for kind in (*checkpoint.KINDS, "average"):
        assert {f"optimizer.state.{kind}.{key}": shape for key, shape in model.items()}.items() <= states.items()
    assert len(states) == 4 * len(model)
