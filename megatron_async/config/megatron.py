"""What may be handed to megatron-core as it is.

Invariants: the names are those of the installed megatron-core, which alone knows them all; they are checked when the
trainer builds its model, before anything is trained (`engine/options.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

Value = float | str | bool | None


@dataclass(frozen=True, slots=True)
class MegatronConfig:
    """Options of megatron-core beyond those of `layout`, `trainer` and `optimizer`, by Megatron's own names. Unknown
    ones, those that this trainer sets itself, and those whose package (Transformer Engine, apex) or GPU is missing are
    refused by name."""

    transformer: dict[str, Value] = field(default_factory=dict)
    """Fields of TransformerConfig: `fp8: hybrid` with `fp8_recipe`, `moe_grouped_gemm`, `moe_permute_fusion`,
    `apply_rope_fusion`, `gradient_accumulation_fusion`, selective recomputation (`recompute_granularity`),
    `overlap_moe_expert_parallel_comm`. Grouped GEMM and fused kernels are on by themselves where Transformer Engine is
    installed."""
    ddp: dict[str, Value] = field(default_factory=dict)
    """Fields of DistributedDataParallelConfig: `overlap_grad_reduce: true` reduces gradients while the backward pass
    goes on, in buckets of `bucket_size` elements."""
    optimizer: dict[str, Value] = field(default_factory=dict)
    """Fields of OptimizerConfig: `optimizer_cpu_offload: true` with `optimizer_offload_fraction` keeps states on the
    host and steps there; `use_precision_aware_optimizer` keeps them in fewer bits. Checkpoints cannot be resumed with
    either."""
