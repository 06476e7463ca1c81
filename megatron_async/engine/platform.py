"""CUDA + NCCL or CPU + gloo: the only module of the trainer that knows which.

Invariants:
- ``setup`` runs before any Megatron module is imported and acts once per process; on a GPU it changes nothing.
- ``init_distributed`` leaves every process group of the layout initialised with one deadline, so that a
  collective whose peer died raises instead of waiting for ever.
- A layout that does not fit the number of ranks is refused with the arithmetic, before any group is made.
"""

import datetime
import functools
import importlib.util
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron_async.config.schema import LayoutConfig
from megatron_async.errors import UserError

_joined: LayoutConfig | None = None
"""The layout whose process groups exist now."""


class PlatformError(UserError):
    """The machine, the installed packages or the number of ranks do not fit what was asked for."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What this process runs on.

    Attributes:
        device: where parameters and activations live.
        backend: torch.distributed backend string.
        transformer_engine: Transformer Engine's fused modules are used for the layers.
    """

    device: torch.device
    backend: str
    transformer_engine: bool

    @property
    def is_gpu(self) -> bool:
        """Whether tensors live on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def scratch_elements(self) -> int:
        """fp32 values that an element-wise pass should hold at once: fill a GPU (128 MiB), stay in a core's cache."""
        return 2**25 if self.is_gpu else 2**16

    def synchronize(self) -> None:
        """Wait for queued device work, so that a wall-clock time means something."""
        if self.is_gpu:
            torch.cuda.synchronize()


@functools.cache
def setup() -> Platform:
    """Detect the platform and, on a CPU, adjust megatron-core so that it runs there. Idempotent.

    Raises:
        PlatformError: megatron-core was imported before, or (CPU) has a version the adjustments were not
            written for.
    """
    if torch.cuda.is_available():
        # With more queues per device, communication of tensor-parallel layers may be scheduled after their compute.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank)
        has_te = importlib.util.find_spec("transformer_engine") is not None
        return Platform(torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl", has_te)
    from megatron_async.engine import cpu_adjustments

    cpu_adjustments.apply_all()
    return Platform(torch.device("cpu"), "gloo", False)


def model_options(moe: bool) -> dict[str, bool]:
    """TransformerConfig fields that depend on the platform: initialisation device and fused kernels."""
    platform = setup()
    fused = platform.transformer_engine
    return {
        "use_cpu_initialization": not platform.is_gpu,
        "moe_grouped_gemm": moe and fused,
        "moe_permute_fusion": moe and fused,
        "apply_rope_fusion": fused,
        "bias_activation_fusion": platform.is_gpu,
        "bias_dropout_fusion": platform.is_gpu,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        # Freed outputs are reused while gloo still sends them under the interleaved schedule: silent corruption.
        "deallocate_pipeline_outputs": platform.is_gpu,
    }


def check_layout(layout: LayoutConfig, world_size: int) -> None:
    """Refuse a layout that the ranks cannot form.

    Raises:
        PlatformError: with the arithmetic that fails.
    """
    tp, pp, cp = (
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.context_parallel_size,
    )
    ep, etp = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size
    if layout.world_size != world_size:
        raise PlatformError(
            f"layout.world_size is {layout.world_size} but {world_size} trainer rank(s) were started; start "
            f"{layout.world_size} (torchrun --nproc-per-node) or set layout.world_size={world_size}"
        )
    for what, size in (
        ("tensor x context x pipeline", tp * cp * pp),
        ("expert x expert-tensor x pipeline", ep * etp * pp),
    ):
        if world_size % size:
            raise PlatformError(
                f"{world_size} rank(s) cannot form the layout: {what} parallel sizes multiply to {size}, and "
                f"{world_size} is not a multiple of {size}; use a multiple of {math.lcm(tp * cp * pp, ep * etp * pp)}"
            )
    if layout.virtual_pipeline_model_parallel_size is not None and pp == 1:
        raise PlatformError(
            "layout.virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1; unset it"
        )


def sequence_parallel(layout: LayoutConfig) -> bool:
    """Whether activations are split along tokens between tensor-parallel ranks (default: whenever TP > 1)."""
    return layout.uses_sequence_parallel and layout.tensor_model_parallel_size > 1


def init_distributed(layout: LayoutConfig, seed: int, *, deadline_s: float = 600.0) -> Platform:
    """Join the process group and build Megatron's groups for ``layout``; reseed every generator with ``seed``.

    Without torchrun's environment the process is a world of one. Calling it again with another layout rebuilds
    the groups (models built for the old layout must no longer be used); with the same layout it does nothing.

    Args:
        deadline_s: seconds after which a collective that a peer never joins raises.

    Raises:
        PlatformError: the layout does not fit the ranks.
    """
    platform = setup()
    timeout = datetime.timedelta(seconds=deadline_s)
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(platform.backend, timeout=timeout)
        else:
            dist.init_process_group(
                platform.backend, store=HashStore(), rank=0, world_size=1, timeout=timeout
            )
    global _joined
    check_layout(layout, dist.get_world_size())
    if _joined != layout:
        _init_model_parallel(layout, seed, deadline_s)
        _joined = layout
    return platform


def _init_model_parallel(layout: LayoutConfig, seed: int, deadline_s: float) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, math.ceil(deadline_s / 60)),
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def shutdown() -> None:
    """Leave all process groups; the process may exit or call ``init_distributed`` again."""
    from megatron.core import parallel_state

    global _joined
    _joined = None
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
