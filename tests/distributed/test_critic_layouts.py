"""The critic under every way of cutting it: values and gradients are transformers', frozen means frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.critic_reference import write_reference
from tests.distributed.launch import launch

SCRIPT = Path(__file__).with_name("critic_ranks.py")
# Two ranks; what tensor, expert and pipeline parallel leave over is data parallel.
LAYOUTS = ("moe", "moe:ep2", "moe:pp2", "moe:cp2", "dense:tp2")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("critic")
    for kind in ("dense", "moe"):
        (directory / kind).mkdir()
        write_reference(directory / kind, kind)
    launch(SCRIPT, 2, str(directory), *LAYOUTS, logs=directory / "logs", timeout_s=240)
    return json.loads((directory / "findings.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_equal_transformers(findings: dict[str, Any], layout: str) -> None:
    found = findings[layout]
    # fp32 sums over hidden states and tokens.
    assert found["value_error"] <= 1e-5
    assert found["after_error"] <= 1e-5
    assert found["loss_error"] <= 1e-5
    assert found["gradient_error"] <= 1e-5, found["gradient_tensor"]
    assert found["gradients_compared"] == {"dense": 48, "moe": 78}[layout.partition(":")[0]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_means_frozen(findings: dict[str, Any], layout: str) -> None:
    """Twenty updates with the distributed optimiser: attention keeps its bits, everything else moves."""
    found = findings[layout]
    assert all("self_attn" in name for name in found["kept"])
    assert not any("self_attn" in name for name in found["moved"])
    assert len(found["kept"]) == 4 * 6  # four layers: q, k, v, o and two norms
    assert found["losses"][1] < found["losses"][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_optimiser_memory_for_what_is_frozen(findings: dict[str, Any], layout: str) -> None:
    found = findings[layout]
    assert found["frozen_in_buffers"] == []
    assert found["masters"] == found["trainable"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_new_head_says_zero_and_a_saved_critic_comes_back(findings: dict[str, Any], layout: str) -> None:
    assert findings[layout]["fresh"] == 0.0
    assert findings[layout]["saved_equal"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_critic_goes_on_bit_for_bit(findings: dict[str, Any], layout: str) -> None:
    assert findings[layout]["resumed_differs"] == []
