"""Checks of a layout, of the trainer's ranks or of the critic's own; part of `config.checks`."""

from __future__ import annotations

import math

from megatron_async.config.hf import ModelShape
from megatron_async.config.schema import LayoutConfig, RunConfig


def layout_problems(layout: LayoutConfig, key: str = "layout") -> list[str]:
    """What keeps ranks from forming a layout. key: of its section."""
    sizes = {
        "world_size": layout.world_size,
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
    }
    small = [f"{key}.{name}: {size} is not at least 1" for name, size in sizes.items() if size < 1]
    if small:
        return small
    problems = []
    dense, experts = layout.model_parallel_size, layout.expert_parallel_product
    if layout.world_size % dense:
        problems.append(
            f"{key}: world_size {layout.world_size} is not a multiple of tensor {layout.tensor_model_parallel_size} "
            f"* pipeline {layout.pipeline_model_parallel_size} * context {layout.context_parallel_size} = {dense}; "
            f"set {key}.world_size to {next_multiple(layout.world_size, dense)} or lower one of them"
        )
    if layout.world_size % experts:
        problems.append(
            f"{key}: world_size {layout.world_size} is not a multiple of expert {layout.expert_model_parallel_size} "
            f"* expert-tensor {layout.expert_tensor_parallel_size} * pipeline {layout.pipeline_model_parallel_size} "
            f"= {experts}; set {key}.world_size to {next_multiple(layout.world_size, experts)} or lower one of them"
        )
    chunks = layout.virtual_pipeline_model_parallel_size
    if chunks is not None and (chunks < 2 or layout.pipeline_model_parallel_size < 2):
        problems.append(
            f"{key}.virtual_pipeline_model_parallel_size: {chunks} chunks on {layout.pipeline_model_parallel_size} "
            "pipeline stage(s); it needs at least 2 of both, or null"
        )
    if layout.sequence_parallel and layout.tensor_model_parallel_size == 1:
        problems.append(f"{key}.sequence_parallel: true needs tensor_model_parallel_size > 1, which is 1")
    return problems


def next_multiple(value: int, of: int) -> int:
    """The smallest multiple of `of` that is not below `value`."""
    return math.ceil(value / of) * of


def model_layout_problems(layout: LayoutConfig, shape: ModelShape, key: str = "layout") -> list[str]:
    """What keeps a model from being cut so. key: of the layout's section."""
    tensor, stages = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    divided = [("num_attention_heads", shape.heads), ("num_key_value_heads", shape.kv_heads)]
    if shape.moe_layers < shape.layers:
        divided.append(("intermediate_size", shape.intermediate))
    problems = [
        problem
        for what, total in divided
        for problem in _divides(what, total, f"{key}.tensor_model_parallel_size", tensor)
    ]
    chunks = layout.virtual_pipeline_model_parallel_size or 1
    if shape.layers % (stages * chunks):
        problems.append(
            f"{key}.pipeline_model_parallel_size: num_hidden_layers = {shape.layers} is not divisible by "
            f"{stages} stages * {chunks} chunks = {stages * chunks}"
        )
    return problems + _expert_problems(layout, shape, key)


def room_problems(config: RunConfig, layout: LayoutConfig, where: str = "") -> list[str]:
    """What keeps a micro-batch from holding the longest trajectory. where: whose layout it is, if not the trainer's."""
    room = config.trainer.micro_batch_tokens * layout.context_parallel_size
    if config.rollout.max_tokens <= room:
        return []
    return [
        f"trainer.micro_batch_tokens: {config.trainer.micro_batch_tokens} * context parallel "
        f"{layout.context_parallel_size}{where} = {room} tokens do not hold one trajectory of rollout.max_tokens = "
        f"{config.rollout.max_tokens}; raise the first or lower the second"
    ]


def _divides(what: str, total: int, option: str, size: int) -> list[str]:
    if size >= 1 and total % size == 0:
        return []
    return [f"{option}: {what} = {total} is not divisible by {size} (remainder {total % size if size else total})"]


def _expert_problems(layout: LayoutConfig, shape: ModelShape, key: str) -> list[str]:
    if not shape.is_moe:
        wrong = {
            "expert_model_parallel_size": layout.expert_model_parallel_size,
            "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
        }
        return [
            f"{key}.{name}: is {size}, but the model has no experts; set it to 1"
            for name, size in wrong.items()
            if size > 1
        ]
    expert, tensor = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size
    problems = _divides("num_experts", shape.experts, f"{key}.expert_model_parallel_size", expert)
    problems += _divides(
        "moe_intermediate_size", shape.expert_intermediate, f"{key}.expert_tensor_parallel_size", tensor
    )
    if layout.tensor_model_parallel_size > 1 and not layout.uses_sequence_parallel:
        problems.append(
            f"{key}.sequence_parallel: false with {layout.tensor_model_parallel_size} tensor-parallel ranks; Megatron "
            "trains a mixture of experts with tensor parallel only with sequence parallel, set it to null or true"
        )
    return problems
