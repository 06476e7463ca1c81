"""How ranks share a model; part of `config.schema`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayoutConfig:
    """How the trainer's ranks share the model; the names are Megatron's. None of them changes the result."""

    world_size: int = 1
    """Trainer ranks in all, over all nodes. What tensor, pipeline and context parallel leave over is data
    parallel."""
    tensor_model_parallel_size: int = 1
    """Ranks over which each matrix is cut. Saves memory, costs two collectives a layer: keep it inside one node."""
    pipeline_model_parallel_size: int = 1
    """Stages into which the layers are cut. Saves memory, idles (stages-1)/(micro-batches) of the time."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Chunks of layers per stage (interleaved schedule). Shrinks the idle share, costs more sends; null is one
    chunk."""
    context_parallel_size: int = 1
    """Ranks over which each sequence is cut. For sequences whose activations do not fit otherwise."""
    expert_model_parallel_size: int = 1
    """Ranks over which the experts are spread. Saves memory of a mixture of experts for two all-to-alls a layer."""
    expert_tensor_parallel_size: int = 1
    """Ranks over which each expert's matrices are cut. Rarely better than more expert parallel."""
    sequence_parallel: bool | None = None
    """Cut the activations outside attention and MLP over the tensor-parallel ranks. null: on when tensor parallel is
    greater than 1. A mixture of experts with tensor parallel cannot train without it."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the dense weights: TP * PP * CP."""
        return (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def expert_parallel_product(self) -> int:
        """Ranks that hold one copy of the experts: EP * ETP * PP."""
        return (
            self.expert_model_parallel_size
            * self.expert_tensor_parallel_size
            * self.pipeline_model_parallel_size
        )

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different sequences: world / (TP * PP * CP)."""
        return self.world_size // self.model_parallel_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same experts: world / (EP * ETP * PP)."""
        return self.world_size // self.expert_parallel_product

    @property
    def uses_sequence_parallel(self) -> bool:
        """`sequence_parallel` with null decided."""
        return (
            self.tensor_model_parallel_size > 1 if self.sequence_parallel is None else self.sequence_parallel
        )
