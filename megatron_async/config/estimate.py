"""What a configuration amounts to: ranks, batch arithmetic, parameters and memory per rank, before anything runs.

Invariants: parameter counts are exact for Qwen3-like decoders, dense and mixture of experts; memory counts weights,
gradients and optimiser states (`config/activations.py` and `config/plan.py` add the rest); sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.config.hf import ModelShape
from megatron_async.config.schema import LayoutConfig, RunConfig, TrainerConfig

GIB = 2**30
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters, split by how they are sharded."""

    dense: int
    """All but the experts: embeddings, attention, norms, routers, dense MLPs, output layer."""
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def _attention(shape: ModelShape, tensor: int) -> tuple[int, int]:
    """Parameters of one layer's attention on one of `tensor` ranks: (cut over the ranks, on every rank)."""
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    cut = shape.hidden * (query + 2 * key_value) + query * shape.hidden
    whole = 2 * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    if shape.attention_bias:
        cut += query + 2 * key_value
        whole += shape.hidden
    return cut // tensor, whole


def _layer(shape: ModelShape, moe: bool, layout: LayoutConfig) -> Parameters:
    """Parameters of one decoder layer on one rank that holds it."""
    cut, whole = _attention(shape, layout.tensor_model_parallel_size)
    if not moe:
        mlp = 3 * shape.hidden * shape.intermediate // layout.tensor_model_parallel_size
        return Parameters(cut + whole + mlp, 0)
    router = shape.hidden * shape.experts
    ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    return Parameters(
        cut + whole + router, 3 * shape.hidden * shape.expert_intermediate * shape.experts // ranks
    )


def parameters_on_stage(shape: ModelShape, layout: LayoutConfig, stage: int) -> Parameters:
    """Parameters on each rank of pipeline stage `stage`.

    With several stages the first and the last hold a copy of tied embeddings each. Where some layers are dense, the
    stage is counted as if it held its even share of both kinds.
    """
    stages = layout.pipeline_model_parallel_size
    moe, plain = _layer(shape, True, layout), _layer(shape, False, layout)
    moe_layers = shape.moe_layers / stages
    dense_layers = (shape.layers - shape.moe_layers) / stages
    dense = round(moe_layers * moe.dense + dense_layers * plain.dense)
    experts = round(moe_layers * moe.experts)
    embedding = shape.vocabulary * shape.hidden // layout.tensor_model_parallel_size
    first, last = stage == 0, stage == stages - 1
    dense += embedding if first else 0
    dense += shape.hidden if last else 0
    if last and not (first and shape.tied_embeddings):
        dense += embedding
    return Parameters(dense, experts)


def parameters_of(shape: ModelShape) -> Parameters:
    """Parameters of the whole model, tied embeddings counted once."""
    return parameters_on_stage(shape, LayoutConfig(), 0)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, without activations."""

    parameters: Parameters
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def weight_width(config: RunConfig) -> int:
    """Bytes of one weight."""
    return 2 if config.model.dtype == "bfloat16" else _FP32


def memory_on_stage(shape: ModelShape, config: RunConfig, stage: int) -> Memory:
    """Memory of each rank of a pipeline stage.

    Gradients are accumulated in fp32. Adam keeps two fp32 moments, and fp32 masters where the weights are bfloat16;
    the distributed optimiser shares both over the ranks that hold the same parameters.
    """
    held = parameters_on_stage(shape, config.layout, stage)
    return _memory(config, config.layout, held, held)


def critic_on_stage(shape: ModelShape, config: RunConfig, stage: int) -> Memory:
    """Memory of the critic on each rank of a pipeline stage, of its own layout where it has one.

    It is the policy's body with a value head; what `critic.freeze` and its companions keep has neither gradients nor
    optimiser states.
    """
    layout, critic = config.critic_layout, config.critic
    first, last = stage == 0, stage == layout.pipeline_model_parallel_size - 1
    embedding = shape.vocabulary * shape.hidden // layout.tensor_model_parallel_size
    held = parameters_on_stage(shape, layout, stage)
    has_output = last and not (first and shape.tied_embeddings)
    dense = held.dense - (embedding if has_output else 0) + (shape.hidden + 1 if last else 0)
    layers = shape.layers / layout.pipeline_model_parallel_size
    cut, whole = _attention(shape, layout.tensor_model_parallel_size)
    norms = 2 * shape.hidden
    frozen = layers * (cut + whole - norms) if critic.freeze == "attention" else 0.0
    frozen += layers * norms + (shape.hidden if last else 0) if critic.freeze_norms else 0
    frozen += embedding if critic.freeze_embeddings and first else 0
    trained = Parameters(round(dense - frozen), held.experts)
    return _memory(config, layout, Parameters(dense, held.experts), trained)


def _memory(config: RunConfig, layout: LayoutConfig, held: Parameters, trained: Parameters) -> Memory:
    width = weight_width(config)
    state = 2 * _FP32 + (_FP32 if width != _FP32 else 0)
    dense_ranks, expert_ranks = _optimizer_ranks(layout, config.trainer)
    return Memory(
        parameters=held,
        weights=width * held.total,
        gradients=_FP32 * trained.total,
        optimizer=round(state * (trained.dense / dense_ranks + trained.experts / expert_ranks)),
    )


def _optimizer_ranks(layout: LayoutConfig, trainer: TrainerConfig) -> tuple[int, int]:
    """Over how many ranks the optimiser's states are shared: (dense, experts)."""
    if not trainer.use_distributed_optimizer:
        return 1, 1
    return layout.data_parallel_size * layout.context_parallel_size, layout.expert_data_parallel_size


def kv_bytes_per_token(shape: ModelShape, width: int) -> int:
    """Bytes of KV cache one token takes in an engine, over all of its ranks."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * width


def bytes_text(size: float) -> str:
    """A size in the largest unit that leaves at least 1."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"
