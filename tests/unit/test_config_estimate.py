"""Parameter counts against transformers and published sizes; memory by hand."""

from __future__ import annotations

import pytest

from megatron_async.config import LayoutConfig, load
from megatron_async.config.describe import describe
from megatron_async.config.estimate import (
    bytes_text,
    memory_on_stage,
    parameters_of,
    parameters_on_stage,
)
from megatron_async.config.hf import shape_from_config
from tests.unit.configs import MOE_SHAPE, write_config

QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "intermediate_size": 6144, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False,
}  # fmt: skip


def _transformers_count(raw: dict) -> int:
    """Parameters of the model that transformers builds from the same sizes, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import tests.engine_reference  # noqa: F401  (lets transformers load beside an installed torchvision)

    sizes = {key: value for key, value in raw.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(raw["model_type"], **sizes))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0, 3]},
        {"attention_bias": True},
        {"model_type": "qwen3"},
    ],
)
def test_parameters_equal_those_of_transformers(changes):
    raw = {**MOE_SHAPE, **changes}
    if raw["model_type"] == "qwen3":
        raw = {key: value for key, value in raw.items() if "expert" not in key and "moe" not in key}
    assert parameters_of(shape_from_config(raw)).total == _transformers_count(raw)


def test_published_size_of_the_30b():
    counted = parameters_of(shape_from_config(QWEN3_30B))
    assert round(counted.total / 1e9, 1) == 30.5
    assert counted.experts == 48 * 128 * 3 * 2048 * 768


@pytest.mark.parametrize(
    "layout",
    [
        LayoutConfig(world_size=4, tensor_model_parallel_size=2, expert_model_parallel_size=2),
        LayoutConfig(world_size=4, pipeline_model_parallel_size=2, expert_model_parallel_size=2),
        LayoutConfig(world_size=4, expert_tensor_parallel_size=2, tensor_model_parallel_size=4),
    ],
)
def test_shares_add_up_to_the_model(layout):
    """Cut parameters add up exactly; those on every rank (norms, routers) and a second copy of embeddings do not."""
    shape = shape_from_config({**QWEN3_30B, "num_key_value_heads": 4})
    whole = parameters_of(shape)
    stages = [parameters_on_stage(shape, layout, s) for s in range(layout.pipeline_model_parallel_size)]
    ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    assert sum(stage.experts for stage in stages) * ranks == whole.experts
    per_layer = 2 * shape.hidden + 2 * shape.head_dim + shape.hidden * shape.experts
    replicated = shape.layers * per_layer + shape.hidden
    tensor = layout.tensor_model_parallel_size
    assert sum(stage.dense for stage in stages) == (whole.dense - replicated) // tensor + replicated


def test_memory_by_hand(tmp_path):
    """bf16: 2 + 4 bytes a parameter, and 12 of optimiser over the ranks that share them; fp32: 4 + 4 + 8."""
    shape = shape_from_config(MOE_SHAPE)
    count = parameters_of(shape)
    layout = ["layout.world_size=4", "layout.expert_model_parallel_size=2"]
    memory = memory_on_stage(shape, load(write_config(tmp_path), layout), 0)
    assert memory.weights == 2 * (count.dense + count.experts // 2)
    assert memory.gradients == 2 * memory.weights
    assert memory.optimizer == round(12 * (count.dense / 4 + count.experts / 2 / 2))
    single = load(write_config(tmp_path), ["model.dtype=float32", "trainer.use_distributed_optimizer=false"])
    whole = memory_on_stage(shape, single, 0)
    assert whole.total == 16 * count.total


def test_description_shows_the_arithmetic(tmp_path):
    layout = [
        "layout.world_size=2",
        "layout.expert_model_parallel_size=2",
        "batch.groups=4",
        "batch.group_size=8",
    ]
    text = describe(load(write_config(tmp_path), layout))
    assert "4 groups * 8 = 32 trajectories, 16 per data-parallel rank" in text
    assert "(1 + 1) * 32 = 64 trajectories running or waiting" in text
    assert f"{parameters_of(shape_from_config(MOE_SHAPE)).total:,} parameters" in text
    assert "unknown: /nowhere" in describe(load(write_config(tmp_path), ["model.path=/nowhere"]))


def test_sizes_in_words():
    assert bytes_text(3 * 2**30) == "3.00 GiB"
    assert bytes_text(1536) == "1.50 KiB"
    assert bytes_text(12) == "12 B"
