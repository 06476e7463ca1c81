"""One record between ranks that hold the same tensors.

Data-parallel ranks hold the same weights. With a `ReplicaGroup`, each of them records only the tensors it owns, and a
walk brings the parts together: memory per rank falls by the number of replicas; a walk costs a collective per record,
and holds whole records while it lasts. It pays where host memory is short; without it every rank steps alone.

Tensors may have different replicas (dense weights over data parallel, experts over expert data parallel): open one
store with its own group for each such set.

Invariants
- Ranks of a group take part in every capture and walk, in the same order. Digests are compared on every rank for every
  tensor, owned or not, and one rank's failure fails the walk on all of them.
- Ownership follows from sizes and order alone, so that all ranks agree without talking.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_async.snapshots.arena import Block
from megatron_async.snapshots.bits import Task, TensorSpec
from megatron_async.snapshots.codec import EMPTY, Mode, Segment
from megatron_async.snapshots.errors import SnapshotError
from megatron_async.snapshots.tiers import Record, Stored

FIELDS = 6


def owners_of(specs: Sequence[TensorSpec], ranks: int) -> list[int]:
    """Owner of each tensor: the largest first, each to the rank that has least so far."""
    load = [0] * ranks
    owners = [0] * len(specs)
    for place in sorted(range(len(specs)), key=lambda place: (-specs[place].nbytes, place)):
        owners[place] = load.index(min(load))
        load[owners[place]] += specs[place].nbytes
    return owners


class ReplicaGroup:
    """The ranks that hold the same tensors.

    Args:
        group: process group; None for all ranks. Its time-out bounds every wait.
        device: where its collectives want their tensors: the host for gloo, the device for NCCL.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self._group = group
        self._device = torch.device(device)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        value = torch.tensor([int(flag)], device=self._device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return bool(value.item())

    def whole(self, record: Record, grid: Sequence[Task]) -> Record:
        """The record with every rank's segments.

        Raises:
            SnapshotError: a rank could not read its part; its own error on that rank.
        """
        failure: SnapshotError | None = None
        table, payload = torch.zeros(0, FIELDS, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8)
        try:
            table, payload = _pack(record, grid)
        except SnapshotError as error:
            failure = error
        if self.any(failure is not None):
            raise failure or SnapshotError(
                f"another rank of the replica group could not read {record.label}; see its log"
            )
        tables = self._gather(table.reshape(-1))
        payloads = self._gather(payload)
        whole = Record(record.label, [EMPTY] * len(grid))
        for rows, octets in zip(tables, payloads, strict=True):
            _unpack(whole, rows.reshape(-1, FIELDS), octets)
        return whole

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's one-dimensional tensor."""
        size = torch.tensor([part.numel()], device=self._device)
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size, group=self._group)
        lengths = [int(length) for length in sizes]
        padded = torch.zeros(max(1, *lengths), dtype=part.dtype, device=self._device)
        padded[: part.numel()] = part
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return [gathered[:length] for gathered, length in zip(parts, lengths, strict=True)]


def _pack(record: Record, grid: Sequence[Task]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (task, mode, width, narrow, wide, bytes) and the payloads one after another, each padded to eight bytes."""
    rows, payloads = [], []
    for index, segment in enumerate(record.segments):
        payload = record.payload(index, grid[index])
        if payload is None:
            continue
        rows.append([index, int(segment.mode), segment.width, segment.narrow, segment.wide, payload.numel()])
        payloads.append(torch.nn.functional.pad(payload.cpu(), (0, -payload.numel() % 8)))
    if not rows:
        return torch.zeros(0, FIELDS, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8)
    return torch.tensor(rows, dtype=torch.int64), torch.cat(payloads)


def _unpack(whole: Record, rows: torch.Tensor, octets: torch.Tensor) -> None:
    start = 0
    for index, mode, width, narrow, wide, nbytes in rows.tolist():
        whole.segments[index] = Segment(Mode(mode), width, narrow, wide)
        whole.stored[index] = Stored(Block(start, nbytes, octets[start : start + nbytes]), packed=False)
        start += nbytes + -nbytes % 8
