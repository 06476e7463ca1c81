"""The weights that an optimiser step makes, tensor by tensor, before any of them is in the model.

A history that keeps differences can then compare old bits with new ones without a copy of the model (see
`snapshots.SnapshotStore.stage_update`).

Invariants:
- What is yielded are the bits that Megatron's own copy of the masters will write: the same rounding of the same
  numbers.
- Under the distributed optimiser each data-parallel rank holds masters of a part only; the parts come from their
  owners, so that every rank sees whole tensors. All ranks of a data-parallel group must iterate to the end.
- One tensor exists at a time, besides what the consumer keeps.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def have_masters(chunks: Iterable[torch.nn.Module]) -> bool:
    """Whether every weight has an fp32 master of its own, so that a step moves masters and leaves weights."""
    return all(parameter.dtype != torch.float32 for chunk in chunks for parameter in chunk.parameters())


def new_weights(
    inner_optimizers: Iterable[Any], chunks: Iterable[Any], named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """(name, new tensor) of every parameter, shapes and dtypes as in the model; collective over data parallel.

    Args:
        inner_optimizers: Megatron's, after their masters have stepped.
        chunks: the DDP-wrapped model. named: this rank's parameters.
    """
    masters = {id(parameter): (master, start) for parameter, master, start in _masters(inner_optimizers)}
    places = _places(chunks)
    for name, parameter in named:
        master, start = masters.get(id(parameter), (None, 0))
        if id(parameter) in places:
            yield name, _gathered(parameter, master, start, places[id(parameter)])
        else:
            yield name, parameter.detach() if master is None else master.detach().to(parameter.dtype)


def _masters(inner_optimizers: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(parameter, its master on this rank, position of the master's first element in the flat parameter)."""
    for inner in inner_optimizers:
        if hasattr(inner, "shard_fp32_from_float16_groups"):  # the distributed optimiser
            groups = zip(inner.model_float16_groups, inner.shard_fp32_from_float16_groups, strict=True)
            for parameters, shards in groups:
                for parameter, shard in zip(parameters, shards, strict=True):
                    yield parameter, shard, inner._get_model_param_range_map(parameter)["param"].start
        else:
            for parameters, masters in zip(
                inner.float16_groups, inner.fp32_from_float16_groups, strict=True
            ):
                for parameter, master in zip(parameters, masters, strict=True):
                    yield parameter, master, 0


class _Place:
    """Where a parameter lies in the buffer that the distributed optimiser cuts into one shard per rank."""

    def __init__(self, group: Any, start: int, shard: int) -> None:
        self.group, self.start, self.shard = group, start, shard

    def pieces(self, numel: int) -> Iterator[tuple[int, int, int]]:
        """(rank in the group, first element, end) of the parameter's parts."""
        for rank in range(self.start // self.shard, (self.start + numel - 1) // self.shard + 1):
            first, end = rank * self.shard - self.start, (rank + 1) * self.shard - self.start
            yield rank, max(first, 0), min(end, numel)


def _places(chunks: Iterable[Any]) -> dict[int, _Place]:
    """By id of the parameter; none without the distributed optimiser."""
    places = {}
    for chunk in chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for parameter, (start, _, bucket_id) in buffer.param_index_map.items():
                bucket = buffer.buckets[bucket_id]
                shard = bucket.param_data.numel() // group.size()
                places[id(parameter)] = _Place(group, start - bucket.offset, shard)
    return places


def _gathered(parameter: Tensor, master: Tensor | None, start: int, place: _Place) -> Tensor:
    """The new parameter from its owners' masters. start: where this rank's master begins."""
    new = torch.empty_like(parameter, memory_format=torch.contiguous_format).detach()
    flat = new.view(-1)
    if master is not None:
        flat[start : start + master.numel()] = master.detach().view(-1)
    if place.group.size() > 1:
        for rank, first, end in place.pieces(flat.numel()):
            # As bytes: not every backend of collectives knows every dtype.
            part = flat[first:end].view(torch.uint8)
            dist.broadcast(part, dist.get_global_rank(place.group, rank), group=place.group)
    return new
