"""Activation memory of one micro-batch on one trainer rank, by counting what the layers keep for the backward pass.

Invariants: every term is the bytes of one tensor that autograd saves, for Megatron's layers as `engine/model.py` builds
them; experts are taken as evenly loaded. Unfused is what runs without fused kernels (its sum is compared with the
tensors of a real step in the tests); fused is the same count for kernels that recompute norms, SwiGLU and RoPE in the
backward pass, and was compared with nothing.

Symbols: T tokens of the micro-batch on this rank, t = T / tensor parallel (sequence parallel), h hidden, Q and K widths
of queries and keys on this rank, f width of an expert, k experts per token, w bytes of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.config.hf import ModelShape
from megatron_async.config.schema import LayoutConfig

_FP32 = 4
_INT64 = 8


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on one rank at the worst moment of a training step."""

    layers: float
    """Saved by the layers, over all micro-batches in flight."""
    logits: float
    """Final norm, logits and their gradient; 0 before the last pipeline stage."""
    recomputed: float
    """One layer's activations, made again during the backward pass; 0 without recomputation."""

    @property
    def total(self) -> int:
        """The logits are gone before the last layer is made again."""
        return round(self.layers + max(self.logits, self.recomputed))


@dataclass(frozen=True, slots=True)
class _Rank:
    """Sizes one rank sees of one micro-batch."""

    shape: ModelShape
    layout: LayoutConfig
    tokens: float
    width: int
    fused: bool

    @property
    def tensor(self) -> int:
        return self.layout.tensor_model_parallel_size

    @property
    def resident(self) -> float:
        """Tokens whose residual stream this rank keeps."""
        return self.tokens / (self.tensor if self.layout.uses_sequence_parallel else 1)

    def norm(self, size: float) -> float:
        """Per token. Unfused: fp32 input and normalised values, and the output; fused: input and output."""
        if self.fused:
            return 2 * self.width * size + _FP32
        return 2 * _FP32 * size + self.width * size + _FP32

    def attention(self) -> float:
        """Per token of the stream, without the norm before it."""
        query = self.shape.heads * self.shape.head_dim / self.tensor
        key = self.shape.kv_heads * self.shape.head_dim / self.tensor
        heads = (self.shape.heads + self.shape.kv_heads) / self.tensor
        projected = self.width * (query + 2 * key)
        rotated = self.width * (query + key)
        attended = self.width * query + _FP32 * self.shape.heads / self.tensor
        statistics = _FP32 * heads if self.shape.qk_norm else 0.0
        if self.fused:
            copies = self.width * query if self.shape.qk_norm else 0.0
            return projected + copies + statistics + rotated + attended
        in_fp32 = 2 * query + key * (1 if self.width == _FP32 else 2)
        copies = _FP32 * in_fp32 if self.shape.qk_norm else 0.0
        angles = 4 * self.width * self.shape.head_dim
        return projected + copies + statistics + rotated + angles + attended + self.width * query

    def dense_mlp(self) -> float:
        """Per token of the stream: gate and up, then (unfused) their SiLU, copy and product."""
        return self.width * (3 if self.fused else 5) * self.shape.intermediate / self.tensor

    def experts(self) -> float:
        """Per resident token: its copies for the experts, their intermediates, and the router's."""
        shape, split = self.shape, self.layout.expert_tensor_parallel_size
        # Ranks that cut an expert gather each other's tokens.
        routed = shape.experts_per_token * split
        inside = (3 if self.fused else 6) * shape.expert_intermediate / split
        router = _FP32 * shape.experts + 2 * _INT64 * shape.experts_per_token
        return self.width * routed * (shape.hidden + inside) + router

    def layer(self, moe: bool) -> float:
        """Bytes of one layer."""
        resident, hidden = self.resident, self.shape.hidden
        mlp = resident * self.experts() if moe else self.tokens * self.dense_mlp()
        return 2 * resident * self.norm(hidden) + self.tokens * self.attention() + mlp

    def head(self) -> float:
        """Final norm, this rank's slice of the logits, and the gradient that replaces nothing."""
        logits = 2 * self.width * self.shape.vocabulary / self.tensor
        return self.resident * self.norm(self.shape.hidden) + self.tokens * logits


def micro_batches_in_flight(layout: LayoutConfig, stage: int) -> float:
    """Micro-batches whose activations a pipeline stage holds at once, under 1F1B.

    Interleaved, (stages - stage - 1) * 2 + (chunks - 1) * stages + 1 chunks are held, each 1/chunks of the layers.
    """
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    if chunks is None:
        return stages - stage
    return ((stages - stage - 1) * 2 + (chunks - 1) * stages + 1) / chunks


def activations_on_stage(
    shape: ModelShape,
    layout: LayoutConfig,
    stage: int,
    *,
    tokens: int,
    width: int,
    recompute: bool,
    fused: bool,
) -> Activations:
    """Activations of each rank of pipeline stage `stage` at the worst moment of a training step.

    tokens: of one micro-batch on one context-parallel rank (`trainer.micro_batch_tokens`). width: bytes of a weight.
    """
    rank = _Rank(shape, layout, tokens, width, fused)
    stages = layout.pipeline_model_parallel_size
    moe, dense = shape.moe_layers / stages, (shape.layers - shape.moe_layers) / stages
    full = moe * (rank.layer(True) if moe else 0.0) + dense * (rank.layer(False) if dense else 0.0)
    kept = (moe + dense) * rank.resident * shape.hidden * width if recompute else full
    largest = max(rank.layer(True) if moe else 0.0, rank.layer(False) if dense else 0.0)
    return Activations(
        layers=kept * micro_batches_in_flight(layout, stage),
        logits=rank.head() if stage == stages - 1 else 0.0,
        recomputed=largest if recompute else 0.0,
    )
