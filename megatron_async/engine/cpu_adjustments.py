"""What megatron-core needs in order to run on a CPU with gloo. Never imported where there is a GPU.

Invariants:
- Written for one megatron-core version; any other is refused, since each adjustment names code of that version.
- Every adjustment has a name and the upstream reason. A rewrite that finds nothing to change is an error: it would
  mean that the code it answers has moved, and that the failure it prevents is back.
- Applied once, before any Megatron module is imported; functions are rewritten in place, so names that other
  modules imported from them follow.
"""

import contextlib
import importlib
import importlib.metadata
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_async.errors import UserError

SUPPORTED_MEGATRON = "0.16.1"


class CpuAdjustmentError(UserError):
    """megatron-core cannot be made to run on this machine's CPU."""


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One named change; ``reason`` says which upstream assumption it answers."""

    name: str
    reason: str
    apply: Callable[[], None]


class NullStream:
    """Stands for a CUDA stream or event where code only orders work: a CPU does it in order anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> "NullStream":
        return self

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "NullStream") -> float:
        return 0.0


def _cuda_entry_points() -> None:
    cpu, stream = torch.device("cpu"), NullStream()
    entry_points: dict[str, Any] = {
        "current_device": lambda: cpu,
        "synchronize": lambda *args, **kwargs: None,
        "current_stream": lambda *args, **kwargs: stream,
        "default_stream": lambda *args, **kwargs: stream,
        "stream": lambda *args: contextlib.nullcontext(),
        "Stream": NullStream,
        "Event": NullStream,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "set_device": lambda *args, **kwargs: None,
        "device_count": lambda: 1,
    }
    for name, replacement in entry_points.items():
        if not hasattr(torch.cuda, name):
            raise CpuAdjustmentError(f"torch.cuda.{name} no longer exists in torch {torch.__version__}")
        setattr(torch.cuda, name, replacement)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _no_jit_fuser() -> None:
    jit = importlib.import_module("megatron.core.jit")
    jit.disable_jit_fuser()


def _cpu_constant(constant: Any) -> Any:
    """The constant with CUDA device names and tensor type names replaced by the CPU's, recursively."""
    if constant == "cuda":
        return "cpu"
    if isinstance(constant, str) and constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
        return constant.replace("torch.cuda.", "torch.")
    if isinstance(constant, tuple):
        return tuple(map(_cpu_constant, constant))
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=tuple(map(_cpu_constant, constant.co_consts)))
    return constant


def rewrite_device_literals(module: str, qualified_name: str) -> None:
    """Replace device literals inside one function of a module, in place.

    Raises:
        CpuAdjustmentError: the function is gone, or holds no such literal.
    """
    target: Any = importlib.import_module(module)
    for part in qualified_name.split("."):
        if not hasattr(target, part):
            raise CpuAdjustmentError(f"{module}.{qualified_name} does not exist in this megatron-core")
        target = getattr(target, part)
    function = getattr(target, "__func__", target)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    rewritten = _cpu_constant(function.__code__)
    if rewritten == function.__code__:
        raise CpuAdjustmentError(f"{module}.{qualified_name} holds no CUDA literal to rewrite")
    function.__code__ = rewritten


def _literals(module: str, *names: str) -> Callable[[], None]:
    def apply() -> None:
        for name in names:
            rewrite_device_literals(module, name)

    return apply


def _replace(module: str, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace ``module.name`` by ``make(original)``; the original must exist."""

    def apply() -> None:
        owner: Any = importlib.import_module(module)
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        if not hasattr(owner, last):
            raise CpuAdjustmentError(f"{module}.{name} does not exist in this megatron-core")
        setattr(owner, last, make(getattr(owner, last)))

    return apply


def _rope_for_context_parallel() -> None:
    utils: Any = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    embedding: Any = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")

    def positions_of_this_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
        size, rank = cp_group.size(), cp_group.rank()
        chunks = pos_emb.chunk(2 * size, seq_dim)
        return torch.cat([chunks[rank], chunks[2 * size - rank - 1]], seq_dim)

    for owner in (utils, embedding):
        owner.get_pos_emb_on_this_cp_rank = positions_of_this_rank


def _set_optimizer_state(_original: Any) -> Any:
    @torch.no_grad()
    def set_state(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, position = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][position]
        state = self.optimizer.state[main_param]
        for key, destination in {"param": main_param, **state}.items():
            if key in tensors:
                destination.copy_(tensors[key])
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()

    return set_state


def _bind_te_general_gemm() -> None:
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if hasattr(moe_utils, "te_general_gemm"):
        raise CpuAdjustmentError("megatron-core binds te_general_gemm itself now; drop this adjustment")
    moe_utils.te_general_gemm = None


def _split_sizes_on_cpu(_original: Any) -> Any:
    def maybe_move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move


def _gather_uneven(original: Any) -> Any:
    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1 or len(set(output_split_sizes)) == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        padded = input_.new_zeros((longest, *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        gathered = original(padded, group)
        return torch.cat([gathered[i * longest : i * longest + n] for i, n in enumerate(output_split_sizes)])

    return gather


_RANDOM = "megatron.core.tensor_parallel.random"
_OPTIMIZER = "megatron.core.optimizer"

ADJUSTMENTS: tuple[Adjustment, ...] = (
    Adjustment(
        "cuda-entry-points",
        "streams, events, device queries and Tensor.cuda() are called without asking for a GPU",
        _cuda_entry_points,
    ),
    Adjustment(
        "jit-fuser",
        "@jit_fuser is torch.compile, which spends minutes building C++ kernels on a CPU",
        _no_jit_fuser,
    ),
    Adjustment(
        "causal-mask",
        "default attention masks are created with device='cuda'",
        _literals(
            "megatron.core.transformer.utils", "get_default_causal_mask", "get_sliding_window_causal_mask"
        ),
    ),
    Adjustment(
        "schedules",
        "the forward-backward schedules create their token counter on 'cuda'",
        _literals(
            "megatron.core.pipeline_parallel.schedules",
            "forward_backward_no_pipelining",
            "forward_backward_pipelining_without_interleaving",
            "forward_backward_pipelining_with_interleaving",
        ),
    ),
    Adjustment(
        "gradient-norm",
        "gradient norm and clipping create tensors on 'cuda'",
        _literals(
            f"{_OPTIMIZER}.clip_grads",
            "get_grad_norm_fp32",
            "clip_grad_by_total_norm_fp32",
            "count_zeros_fp32",
        ),
    ),
    Adjustment(
        "optimizer-types",
        "optimisers accept a parameter only if its type string begins with torch.cuda",
        _literals(
            f"{_OPTIMIZER}.optimizer",
            "MixedPrecisionOptimizer.__init__",
            "Float16OptimizerWithFloat16Params.__init__",
            "FP32Optimizer.__init__",
        ),
    ),
    Adjustment(
        "distributed-optimizer-types",
        "the distributed optimiser sorts parameters by torch.cuda type strings",
        _literals(
            f"{_OPTIMIZER}.distrib_optimizer", "DistributedOptimizer._build_model_and_main_param_groups"
        ),
    ),
    Adjustment(
        "l2-norm",
        "the local multi-tensor norm creates its result on 'cuda'",
        _literals("megatron.core.utils", "local_multi_tensor_l2_norm"),
    ),
    Adjustment(
        "moe-metrics",
        "tracking of MoE losses creates tensors on 'cuda'",
        _literals("megatron.core.transformer.moe.moe_utils", "track_moe_metrics"),
    ),
    Adjustment(
        "context-parallel-rope",
        "the index of a rank's positions is built in pinned memory and moved to a GPU",
        _rope_for_context_parallel,
    ),
    Adjustment(
        "optimizer-state-load",
        "loading looks up torch AdamW's 'step' and leaves one shared step tensor, counted once per parameter",
        _replace(
            f"{_OPTIMIZER}.distrib_optimizer",
            "DistributedOptimizer._set_main_param_and_optimizer_states",
            _set_optimizer_state,
        ),
    ),
    Adjustment(
        "router-gemm",
        "te_general_gemm is only bound when Transformer Engine imports, but tested unconditionally",
        _bind_te_general_gemm,
    ),
    Adjustment(
        "dispatcher-splits",
        "split sizes become lists only if tensor.is_cuda",
        _replace(
            "megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", _split_sizes_on_cpu
        ),
    ),
    Adjustment(
        "uneven-gather",
        "gloo's all_gather wants equal shapes: pad to the longest and cut",
        _replace("megatron.core.tensor_parallel.mappings", "_gather_along_first_dim", _gather_uneven),
    ),
    Adjustment(
        "rng-get",
        "the generator state is read from torch.cuda.default_generators",
        _replace(_RANDOM, "_get_cuda_rng_state", lambda _: lambda *args, **kwargs: torch.get_rng_state()),
    ),
    Adjustment(
        "rng-set",
        "the generator state is written to torch.cuda.default_generators",
        _replace(
            _RANDOM,
            "_set_cuda_rng_state",
            lambda _: lambda state, *args, **kwargs: torch.set_rng_state(state),
        ),
    ),
)


def check_version(installed: str) -> None:
    """Refuse a megatron-core for which the adjustments were not written.

    Raises:
        CpuAdjustmentError: naming both versions and the fix.
    """
    if installed != SUPPORTED_MEGATRON:
        raise CpuAdjustmentError(
            f"megatron-core {installed} is installed, but running on a CPU is written for {SUPPORTED_MEGATRON}; "
            f"run: pip install megatron-core=={SUPPORTED_MEGATRON}"
        )


def apply_all() -> None:
    """Apply every adjustment; call once per process.

    Raises:
        CpuAdjustmentError: unsupported version, Megatron already imported, or a rewrite that changes nothing.
    """
    check_version(importlib.metadata.version("megatron-core"))
    if "megatron.core.parallel_state" in sys.modules:
        raise CpuAdjustmentError(
            "megatron-core was imported before megatron_async.engine; import megatron_async.engine first"
        )
    warnings.filterwarnings("ignore", message="Apex is not installed")
    for adjustment in ADJUSTMENTS:
        adjustment.apply()
