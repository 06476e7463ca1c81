"""Megatron's DDP, optimiser and learning-rate schedule, and one careful step.

Invariants:
- Gradients are summed over ranks and micro-batches and divided by nothing: the loss comes already normalised.
- bf16 weights have fp32 masters; gradients are reduced in fp32.
- The schedule counts optimiser steps that were made, nothing else; a skipped step leaves weights, moments and schedule
  exactly as they were.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_async.config.megatron import MegatronConfig
from megatron_async.config.schema import OptimizerConfig
from megatron_async.engine import options
from megatron_async.engine.new_weights import new_weights

NamedTensors = Iterator[tuple[str, torch.Tensor]]

ENDLESS = 2**31
"""Decay steps of a schedule that never decays."""
NOTHING_FURTHER = MegatronConfig()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Attributes:
    grad_norm: global L2 norm before clipping.
    lr: learning rate of the step that was made (of the last one, if it was skipped).
    skipped: why no step was made, or None.
    """

    grad_norm: float
    lr: float
    skipped: str | None


def wrap_ddp(
    config: TransformerConfig,
    chunks: list[GPTModel],
    *,
    distributed_optimizer: bool,
    further: MegatronConfig = NOTHING_FURTHER,
) -> list[DistributedDataParallel]:
    """Give every chunk Megatron's gradient buffers; broadcast parameters from data-parallel rank 0.

    Raises:
        OptionError: `trainer.megatron.ddp` asks for what cannot be.
    """
    own = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": distributed_optimizer,
        # Non-finite gradients are found by the norm and skip the step; DDP's own check would end the run.
        "check_for_nan_in_grad": False,
        "average_in_collective": False,
    }
    ddp_config: DistributedDataParallelConfig = options.build("ddp", own, further.ddp)
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    config.finalize_model_grads_func = finalize_undivided
    if ddp_config.overlap_grad_reduce:
        # Only the last micro-batch of a step starts reducing; before it the gradients are still accumulated.
        waits = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]  # type: ignore[assignment]
    return wrapped


def finalize_undivided(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Megatron's gradient finalisation without its division by the number of tokens."""
    finalize_model_grads(model, None, **options)


class Optimizer:
    """Adam over this rank's parameters, with its schedule."""

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: list[DistributedDataParallel],
        *,
        dtype: torch.dtype,
        distributed: bool,
        further: MegatronConfig = NOTHING_FURTHER,
    ) -> None:
        self.config = config
        self._chunks = chunks
        self._distributed = distributed
        own = {
            "optimizer": "adam",
            "lr": config.lr,
            "min_lr": config.min_lr,
            "weight_decay": config.weight_decay,
            "adam_beta1": config.adam_beta1,
            "adam_beta2": config.adam_beta2,
            "adam_eps": config.adam_eps,
            "clip_grad": config.clip_grad,
            "bf16": dtype == torch.bfloat16,
            "params_dtype": dtype,
            "use_distributed_optimizer": distributed,
        }
        self.megatron_config: MegatronOptimizerConfig = options.build("optimizer", own, further.optimizer)
        self.megatron = get_megatron_optimizer(self.megatron_config, chunks, use_gloo_process_groups=False)
        self.schedule = _schedule(config, self.megatron)
        self._observer: Callable[[NamedTensors], None] | None = None
        self._named: Callable[[], NamedTensors] | None = None

    def observe(self, observer: Callable[[NamedTensors], None], named: Callable[[], NamedTensors]) -> None:
        """Call `observer` in every step with the new weights, before any of them is written into the model.

        It must iterate to the end, and may write those same bits itself. named: this rank's parameters by name. Weights
        without masters of their own are already written then: see `new_weights.have_masters`.
        """
        self._observer, self._named = observer, named

    @property
    def num_steps(self) -> int:
        """Optimiser steps made so far."""
        return self.schedule.num_steps

    def zero_grad(self, chunks: list[DistributedDataParallel]) -> None:
        """Forget all gradients; call before every accumulation."""
        for chunk in chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self, *, skip: str | None = None) -> StepOutcome:
        """Make one step on the accumulated gradients, or say why not.

        No step is made if ``skip`` gives a reason, if the gradient is not finite, or if it is exactly zero: Adam
        would otherwise move the weights by momentum without any data.
        """
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if skip is None and not math.isfinite(norm):
            skip = f"the gradient norm is {norm}; weights and optimiser are unchanged"
        if skip is None and norm == 0.0:
            skip = "the gradient is exactly zero: no token carries a learning signal"
        if skip is not None:
            return StepOutcome(norm, self._lr(), skip)
        self.schedule.step(1)
        if self.config.clip_grad > 0:
            self._clip(norm)
        if self._observer is None or self._named is None:
            self.megatron.step_with_ready_grads()
        else:
            for inner in self.inner_optimizers():
                inner.optimizer.step()
            self._observer(new_weights(self.inner_optimizers(), self._chunks, self._named()))
            self._write_masters()
        return StepOutcome(norm, self._lr(), None)

    def _clip(self, norm: float) -> None:
        for inner in self.inner_optimizers():
            parameters = inner.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self.config.clip_grad, total_norm=norm)

    def inner_optimizers(self) -> list[Any]:
        """Those that hold parameters on this rank."""
        inner = self.megatron.chained_optimizers
        return [optimizer for optimizer in inner if not getattr(optimizer, "is_stub_optimizer", False)]

    def masters(self) -> list[torch.Tensor]:
        """The fp32 weights that steps are made on, live: this rank's shard, in an order that never changes."""
        return [master for inner in self.inner_optimizers() for master in inner.get_parameters()]

    @torch.no_grad()
    def exchange_masters(self, values: Sequence[torch.Tensor]) -> None:
        """Swap the masters' contents with those of `values` and put them into the model; collective.

        Done twice it changes no bit: the model's weights are the masters rounded, before and after. values: fp32, in
        the order and shapes of `masters`; they hold the masters meanwhile.
        """
        for master, value in zip(self.masters(), values, strict=True):
            kept = master.detach().clone()
            master.copy_(value)
            value.copy_(kept)
        self._write_masters()

    def _write_masters(self) -> None:
        """Put the masters into the model, rounded to its dtype; collective."""
        for inner in self.inner_optimizers():
            # Masters of fp32 weights are the weights themselves, and Megatron's plain fp32 optimiser has no such copy.
            if hasattr(inner, "_copy_main_params_to_model_params"):
                inner._copy_main_params_to_model_params()
        if self._distributed:
            for chunk in self._chunks:
                chunk.start_param_sync()

    @torch.no_grad()
    def resume_at(self, num_steps: int) -> None:
        """Go on as if ``num_steps`` steps had been made: the schedule, and Adam's bias correction.

        Each parameter gets a step count of its own: one tensor shared by several would count once for each of them.
        """
        self.schedule.num_steps = 0
        self.schedule.step(num_steps)
        for inner in self.inner_optimizers():
            for state in inner.optimizer.state.values():
                if "step" in state:
                    state["step"] = torch.full_like(state["step"], num_steps)
            for group in inner.optimizer.param_groups:
                if "step" in group:  # where the optimiser counts per group
                    group["step"] = num_steps

    def _lr(self) -> float:
        return float(self.megatron.param_groups[0]["lr"]) if self.num_steps else 0.0

    def reload_weights(self) -> None:
        """Take the model's weights over into the fp32 masters; call after writing the model's parameters."""
        self.megatron.reload_model_params()


def _schedule(config: OptimizerConfig, optimizer: Any) -> OptimizerParamScheduler:
    decay_steps = config.lr_decay_steps or ENDLESS
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=max(decay_steps, config.lr_warmup_steps + 1),
        lr_decay_style=config.lr_decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
