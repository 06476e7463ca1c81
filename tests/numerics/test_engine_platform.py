"""Platform: layouts that do not fit are refused with the arithmetic; CPU adjustments refuse what they do not know."""

from __future__ import annotations

import pytest
import torch

from megatron_async.config.schema import LayoutConfig
from megatron_async.engine import cpu_adjustments, platform
from megatron_async.engine.cpu_adjustments import CpuAdjustmentError
from megatron_async.engine.hf_config import HFConfig
from megatron_async.engine.model import LayoutError, check_model_fits
from megatron_async.engine.platform import PlatformError, check_layout

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the adjustments are for CPUs only")


def test_layout_that_does_not_divide_the_ranks_shows_the_arithmetic() -> None:
    layout = LayoutConfig(world_size=6, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    with pytest.raises(PlatformError, match="6 rank.*multiply to 4.*not a multiple of 4.*multiple of 4"):
        check_layout(layout, 6)


def test_wrong_number_of_ranks_names_both_numbers() -> None:
    with pytest.raises(PlatformError, match="world_size is 4 but 1 trainer rank"):
        check_layout(LayoutConfig(world_size=4), 1)


def make_hf(**changes: object) -> HFConfig:
    values: dict[str, object] = {
        "model_type": "qwen3_moe",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "moe_layers": (True,) * 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    return HFConfig(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_model_parallel_size": 4}, "num_key_value_heads=2 is not a multiple of .*tensor.*=4"),
        ({"expert_model_parallel_size": 4}, "num_experts=6 is not a multiple of .*expert_model.*=4"),
        ({"pipeline_model_parallel_size": 3}, "num_hidden_layers=4 .*pipeline.*=3"),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": False},
            "needs layout.sequence_parallel=true",
        ),
    ],
)
def test_model_that_the_layout_cannot_cut_names_dimension_and_setting(
    layout: dict[str, object], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        check_model_fits(make_hf(), LayoutConfig(**layout))  # type: ignore[arg-type]


def test_expert_parallel_needs_experts() -> None:
    dense = make_hf(model_type="qwen3", moe_layers=(False,) * 4, num_experts=0, moe_intermediate_size=0)
    with pytest.raises(LayoutError, match="need a mixture of experts"):
        check_model_fits(dense, LayoutConfig(expert_model_parallel_size=2))


@needs_cpu
def test_other_megatron_versions_are_refused_with_the_fix() -> None:
    with pytest.raises(CpuAdjustmentError, match=r"0\.17\.0.*pip install megatron-core==0\.16\.1"):
        cpu_adjustments.check_version("0.17.0")


@needs_cpu
def test_a_rewrite_that_changes_nothing_fails() -> None:
    # Already rewritten once in this process, so no CUDA literal is left.
    with pytest.raises(CpuAdjustmentError, match="no CUDA literal"):
        cpu_adjustments.rewrite_device_literals("megatron.core.utils", "local_multi_tensor_l2_norm")
    with pytest.raises(CpuAdjustmentError, match="does not exist"):
        cpu_adjustments.rewrite_device_literals("megatron.core.utils", "no_such_function")


@needs_cpu
def test_adjusting_after_megatron_was_imported_is_refused() -> None:
    with pytest.raises(CpuAdjustmentError, match="imported before"):
        cpu_adjustments.apply_all()


@needs_cpu
def test_every_adjustment_has_a_name_and_a_reason() -> None:
    names = [adjustment.name for adjustment in cpu_adjustments.ADJUSTMENTS]
    assert len(set(names)) == len(names)
    assert all(len(adjustment.reason) > 20 for adjustment in cpu_adjustments.ADJUSTMENTS)


def test_setup_is_idempotent() -> None:
    assert platform.setup() is platform.setup()
