"""One pass over a rank's micro-batches through Megatron's forward-backward schedule, and its results on every rank.

Invariants:
- The schedule is Megatron's own, so pipeline and virtual pipeline stages work alike; the last stage reads the tokens'
  values (log-probs and entropies of a policy, state values of a critic) off the model's output.
- Values kept for reporting are detached copies: the schedule may change the loss tensor it was given.
- Results are equal on all ranks: each token's value comes from the one rank that computed it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from megatron_async.engine.gather import all_gather_json
from megatron_async.engine.sequences import MicroBatch

LossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""``(packed, *values) → (loss, stats)`` with the readout's values, [T] each."""
Readout = Callable[[Tensor, MicroBatch], tuple[Tensor, ...]]
"""``(output of the last stage, micro-batch) → values``, fp32 [T] each, token-aligned."""


@dataclass(frozen=True, slots=True)
class MicroResult:
    """Detached results of one micro-batch on the last pipeline stage."""

    flat_index: Tensor
    values: tuple[Tensor, ...]
    loss: Tensor | None
    stats: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PassResult:
    """This rank's micro-batch results (empty before the last pipeline stage)."""

    micro_results: list[MicroResult]

    def gather_tokens(self, kinds: int, num_tokens: int, device: torch.device) -> NDArray[np.float32]:
        """The readout's values of the whole batch, float32 [kinds, num_tokens], on every rank (collective)."""
        values = torch.zeros(kinds, num_tokens, dtype=torch.float32, device=device)
        if _reports():
            for result in self.micro_results:
                values[:, result.flat_index] = torch.stack(result.values)
        dist.all_reduce(values)
        return values.cpu().numpy()

    def gather_stats(self) -> tuple[float, dict[str, NDArray[np.float64]]]:
        """Loss, and statistics of any shape, summed over the global batch, on every rank (collective)."""
        local: dict[str, NDArray[np.float64]] = {}
        if _reports():
            for result in self.micro_results:
                reported = {**result.stats, "": result.loss} if result.loss is not None else result.stats
                for name, value in reported.items():
                    local[name] = np.asarray(local.get(name, 0.0) + value.double().cpu().numpy())
        total: dict[str, NDArray[np.float64]] = {}
        for part in all_gather_json({name: amount.tolist() for name, amount in local.items()}):
            for name, amount in part.items():
                total[name] = np.asarray(total.get(name, 0.0) + np.asarray(amount, np.float64))
        return float(total.pop("", np.zeros(()))), total


def _reports() -> bool:
    """Whether this rank's token values are the ones that count: last stage, first of its tensor-parallel group."""
    return (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def run_pass(
    chunks: list[Any], micro_batches: list[MicroBatch], loss_fn: LossFn | None, readout: Readout
) -> PassResult:
    """Forward every micro-batch, and with a ``loss_fn`` backward too (gradients accumulate in the DDP buffers).

    Args:
        chunks: this rank's model chunks (DDP-wrapped for training).
        micro_batches: equally many on every data-parallel rank.
        loss_fn: its part of the globally normalised loss and statistics to be summed; not called for micro-batches
            without tokens, but called where only this context-parallel rank's share has none. None runs forward only.
        readout: what the model's output says of each token.
    """
    results: list[MicroResult] = []

    def forward_step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        output = model(
            micro_batch.input_ids, micro_batch.position_ids, None, packed_seq_params=micro_batch.attention
        )
        return output, partial(_finish, micro_batch, loss_fn, readout, results)

    iterators = [iter(micro_batches) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=max(batch.input_ids.shape[1] for batch in micro_batches),
        micro_batch_size=1,
        forward_only=loss_fn is None,
    )
    return PassResult(results)


def _finish(
    micro_batch: MicroBatch, loss_fn: LossFn | None, readout: Readout, results: list[MicroResult], output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's loss function: (loss, token count, report); the count is ignored by our gradient finalisation."""
    values = readout(output, micro_batch)
    packed = micro_batch.packed
    loss: Tensor | None = None
    stats: dict[str, Tensor] = {}
    if loss_fn is not None and micro_batch.num_tokens > 0:
        loss, stats = loss_fn(packed, *values)
    results.append(
        MicroResult(
            packed.flat_index,
            tuple(value.detach() for value in values),
            None if loss is None else loss.detach().clone(),
            {name: value.detach() for name, value in stats.items()},
        )
    )
    if loss is None or not loss.requires_grad:
        # Padding, or nothing to learn here: the backward pass must run all the same, for its collectives.
        loss = values[0].sum() * 0.0
    count = torch.tensor(len(packed), dtype=torch.int, device=output.device)
    return loss, count, {}
