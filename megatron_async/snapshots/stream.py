"""Steps from old bits to new ones: records that are no versions yet, of weights that may arrive tensor by tensor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_async.snapshots.bits import Task, words_of
from megatron_async.snapshots.errors import TensorSetError
from megatron_async.snapshots.tiers import Record, RecordBuilder
from megatron_async.snapshots.walker import Weights

Encode = Callable[[int, torch.Tensor, torch.Tensor], int | torch.Tensor]
"""Encodes one task from its old words to its new ones; returns the digest of the new ones."""


@dataclass(frozen=True, slots=True)
class Step:
    """A complete record that is no version yet, and the digests of the bits it leads to."""

    builder: RecordBuilder
    record: Record
    digests: np.ndarray
    seconds: float


def encode_step(
    weights: Weights,
    builder: RecordBuilder,
    owned: Sequence[bool],
    fill: Callable[[Encode], list[int | torch.Tensor]],
) -> Step:
    """Let `fill` encode every task, and complete the record.

    Args:
        owned: by tensor, whether this rank records it. fill: returns the digests by task.

    Raises:
        BudgetExceededError: no tier has room; nothing is left of the record.
    """
    began = time.perf_counter()

    def encode(index: int, old: torch.Tensor, new: torch.Tensor) -> int | torch.Tensor:
        mine = owned[weights.grid[index].tensor]
        return weights.encode(index, old, new, builder if mine else None)

    try:
        digests = weights.per_tensor(fill(encode))
        record = builder.finish(durable=False)
    except BaseException:
        builder.discard()
        raise
    return Step(builder, record, digests, time.perf_counter() - began)


def encode_stream(
    weights: Weights,
    tensors: Iterable[tuple[str, torch.Tensor]],
    encode: Callable[[int, torch.Tensor], int | torch.Tensor],
) -> list[int | torch.Tensor]:
    """Call `encode(task index, new words)` for every task, as its tensor arrives; returns its results by task.

    Args:
        tensors: every tensor's new value once, by name, in any order.

    Raises:
        TensorSetError: a tensor is missing, unknown, given twice or of another shape or dtype.
    """
    places = {spec.name: place for place, spec in enumerate(weights.specs)}
    tasks: dict[int, list[int]] = {place: [] for place in places.values()}
    for index, task in enumerate(weights.grid):
        tasks[task.tensor].append(index)
    parts: list[int | torch.Tensor] = [0] * len(weights.grid)
    for name, tensor in tensors:
        place = places.pop(name, None)
        spec = None if place is None else weights.specs[place]
        if (
            place is None
            or spec is None
            or (str(tensor.dtype), tuple(tensor.shape))
            != (
                f"torch.{spec.dtype}",
                spec.shape,
            )
        ):
            expected = (
                "no (further) tensor of that name" if spec is None else f"{spec.dtype}{list(spec.shape)}"
            )
            given = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            raise TensorSetError(f"the new weights hold '{name}' as {given}; expected {expected}")
        work = _encode_from(words_of(tensor.contiguous()), encode)
        for index, total in zip(tasks[place], weights.run(work, tasks[place]), strict=True):
            parts[index] = total
    if places:
        raise TensorSetError(
            f"the new weights lack {len(places)} tensors, the first is '{next(iter(places))}'"
        )
    return parts


def _encode_from(
    words: torch.Tensor, encode: Callable[[int, torch.Tensor], int | torch.Tensor]
) -> Callable[[int, Task], int | torch.Tensor]:
    return lambda index, task: encode(index, words[task.start : task.start + task.length])
