"""What `trainer.megatron` hands to megatron-core, and what of it is refused.

Invariants:
- A name is refused that megatron-core does not have, that this engine sets itself, or that would break what the engine
  relies on; the message says why and what to do.
- A feature whose package or GPU is missing is refused by name instead of failing inside a step.
"""

import dataclasses
import difflib
import importlib.util
from collections.abc import Collection, Mapping
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_async.config.megatron import Value
from megatron_async.engine import platform
from megatron_async.errors import UserError


class OptionError(UserError):
    """An option of megatron-core that cannot be set here."""


CLASSES: dict[str, type] = {
    "transformer": TransformerConfig,
    "ddp": DistributedDataParallelConfig,
    "optimizer": OptimizerConfig,
}

_KERNELS = "transformer_engine"

NEEDS: dict[str, str] = {
    "fp8": _KERNELS,
    "fp4": _KERNELS,
    "moe_grouped_gemm": _KERNELS,
    "moe_permute_fusion": _KERNELS,
    "moe_router_fusion": _KERNELS,
    "apply_rope_fusion": _KERNELS,
    "fused_single_qkv_rope": _KERNELS,
    "cpu_offloading": _KERNELS,
    "fine_grained_activation_offloading": _KERNELS,
    "use_precision_aware_optimizer": _KERNELS,
    "gradient_accumulation_fusion": f"{_KERNELS} apex",
    "persist_layer_norm": "apex",
    "masked_softmax_fusion": "CUDA",
    "bias_activation_fusion": "CUDA",
    "bias_dropout_fusion": "CUDA",
    "cuda_graph_impl": "CUDA",
    "optimizer_cpu_offload": "CUDA",
    "overlap_moe_expert_parallel_comm": "CUDA",
}
"""Feature: the package that holds its kernels (any of several), or CUDA."""

HOW = {
    "transformer_engine": "Transformer Engine is not installed (pip install transformer-engine[pytorch], beside a GPU)",
    "apex": "apex with its extensions is not installed (github.com/NVIDIA/apex)",
    "CUDA": "there is no CUDA device",
}

REFUSED: dict[str, str] = {
    "overlap_param_gather": "the history and publishing read whole weights right after every step, so that there is no "
    "forward pass to gather them behind",
    "overlap_param_gather_with_optimizer_step": "whole weights are read right after every step",
    "tp_comm_overlap": "its buffers have one shape, and packed micro-batches differ in length",
    "average_in_collective": "the loss is normalised over the global batch before any collective",
    "check_for_nan_in_grad": "a gradient that is not finite skips the step and says so, instead of ending the run",
    "moe_enable_routing_replay": "set trainer.routing_replay, which replays under every layout",
    "deallocate_pipeline_outputs": "whether it is safe depends on the backend, which the engine knows",
    "use_cpu_initialization": "weights are loaded, not initialised",
}

OPTIONAL = frozenset(
    {
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "apply_rope_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "gradient_accumulation_fusion",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
    }
)
"""Fields that the engine has a default for and leaves to the user."""


def merged(kind: str, own: Mapping[str, Any], given: Mapping[str, Value]) -> dict[str, Any]:
    """The engine's own options of one of Megatron's configurations with those of `trainer.megatron` laid over.

    Raises:
        OptionError: for the first option that cannot be set.
    """
    known = {field.name for field in dataclasses.fields(CLASSES[kind])}
    for name, value in given.items():
        problem = _problem(name, value, known, own.keys() - OPTIONAL)
        if problem:
            raise OptionError(f"trainer.megatron.{kind}.{name}: {problem}")
    return {**own, **given}


def _problem(name: str, value: Value, known: Collection[str], owned: Collection[str]) -> str:
    """Why an option cannot be set; empty if it can."""
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        return "megatron-core has no such option" + (f"; did you mean {close[0]!r}?" if close else "")
    if not value:
        return "" if name not in owned else "the engine sets it; remove it"
    if name in REFUSED:
        return f"cannot be used here: {REFUSED[name]}; remove it"
    if name in owned:
        return "the engine sets it from layout, model, trainer and optimizer; remove it"
    missing = _missing(NEEDS.get(name, ""))
    return f"{missing}, which it needs; remove the option, or run where that is present" if missing else ""


def _missing(needs: str) -> str:
    """Which of some alternatives to install; empty if one is there, or none is needed."""
    alternatives = needs.split()
    if not alternatives or any(map(_present, alternatives)):
        return ""
    return " or ".join(HOW[need] for need in alternatives)


def _present(need: str) -> bool:
    return platform.setup().is_gpu if need == "CUDA" else importlib.util.find_spec(need) is not None


def token_multiple(given: Mapping[str, Value]) -> int:
    """What the length of a packed stream must be a multiple of: fp8 products take rows by 16."""
    return 16 if given.get("fp8") else 1


def build(kind: str, own: Mapping[str, Any], given: Mapping[str, Value]) -> Any:
    """One of Megatron's configuration objects, made of `merged` options.

    Raises:
        OptionError: also with Megatron's own words, where it refuses a combination.
    """
    values = merged(kind, own, given)
    if not given:
        return CLASSES[kind](**values)
    try:
        return CLASSES[kind](**values)
    except (AssertionError, TypeError, ValueError) as error:
        listed = ", ".join(f"{name}: {value}" for name, value in given.items())
        raise OptionError(f"megatron-core refuses trainer.megatron.{kind} ({listed}): {error}") from error
