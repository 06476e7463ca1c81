"""The codec's host backend: compiled kernels, scratch memory kept per thread and bounded by the task size."""

from __future__ import annotations

import threading

import numpy as np
import torch

from megatron_async.snapshots import host_kernels
from megatron_async.snapshots.bits import GROUP_SLACK, Task, host_words
from megatron_async.snapshots.codec import (
    EMPTY,
    SPARSE_LIMIT,
    WIDE_LIMIT,
    Mode,
    Segment,
    columns_of,
    dense_bytes,
    narrow_bytes,
)

WORDS: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class _Scratch:
    """Growing byte buffers by name; each thread has its own."""

    def __init__(self) -> None:
        self.buffers: dict[str, np.ndarray] = {}

    def array(self, name: str, count: int, dtype: type[np.generic]) -> np.ndarray:
        nbytes = count * np.dtype(dtype).itemsize
        buffer = self.buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            buffer = self.buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype)


class HostKernels:
    """Implements `codec.Kernels` for tensors in host memory."""

    def __init__(self) -> None:
        self._local = threading.local()

    def _scratch(self) -> _Scratch:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = _Scratch()
        scratch: _Scratch = self._local.scratch
        return scratch

    def encode(self, task: Task, old: torch.Tensor, new: torch.Tensor) -> tuple[Segment, torch.Tensor | None]:
        before, after = host_words(old), host_words(new)
        scratch = self._scratch()
        limit = int(SPARSE_LIMIT * task.length)
        room = limit + GROUP_SLACK
        word, narrow_type = WORDS[task.word], WORDS[narrow_bytes(task.word)]
        counts = scratch.array("counts", task.chunks * 2, np.int32).reshape(task.chunks, 2)
        offsets = scratch.array("offsets", room, np.uint16)
        values = scratch.array("values", room, narrow_type)
        wide_offsets = scratch.array("wide_offsets", room, np.uint16)
        wide_values = scratch.array("wide_values", room, word)
        narrow, wide = -1, -1
        if host_kernels.sampled_share(before, after) <= 1.2 * SPARSE_LIMIT:
            narrow, wide = host_kernels.encode_sparse(
                before,
                after,
                limit,
                8 * narrow_bytes(task.word),
                counts,
                offsets,
                values,
                wide_offsets,
                wide_values,
            )
        if narrow == 0 and wide == 0:
            return EMPTY, None
        planes = None
        if narrow >= 0:
            segment = Segment(Mode.SPARSE, narrow_bytes(task.word), narrow, wide)
        else:
            width = self._width(task, before, after)
            planes = scratch.array("planes", width * task.length, np.uint8).reshape(width, task.length)
            wide = host_kernels.encode_dense(before, after, planes, counts, wide_offsets, wide_values)
            segment = Segment(Mode.DENSE, width, 0, wide)
        low = values[:narrow] if planes is None else planes
        columns = (counts, wide_values[:wide], offsets[: segment.narrow], wide_offsets[:wide], low)
        return segment, self._assemble(task, segment, columns)

    def _width(self, task: Task, before: np.ndarray, after: np.ndarray) -> int:
        """Planes that make the dense form smallest, counted on the words themselves."""
        best, smallest = task.word, dense_bytes(task, task.word, 0)
        for width in range(1, task.word):
            wide = host_kernels.count_above(before, after, 8 * width)
            if wide <= WIDE_LIMIT * task.length and dense_bytes(task, width, wide) < smallest:
                best, smallest = width, dense_bytes(task, width, wide)
        return best

    def _assemble(self, task: Task, segment: Segment, columns: tuple[np.ndarray, ...]) -> torch.Tensor:
        layout = columns_of(task, segment)
        payload = self._scratch().array("payload", layout.nbytes, np.uint8)
        slots = (layout.counts, layout.wide_values, layout.offsets, layout.wide_offsets, layout.values)
        end = 0
        for slot, column in zip(slots, columns, strict=True):
            payload[end : slot.start] = 0
            payload[slot] = column.reshape(-1).view(np.uint8)
            end = slot.stop
        payload[end:] = 0
        return torch.from_numpy(payload)

    def apply(
        self,
        task: Task,
        words: torch.Tensor,
        segment: Segment,
        payload: torch.Tensor | None,
        with_digest: bool,
    ) -> int:
        if segment.mode == Mode.EMPTY or payload is None:
            return self.digest(task, words) if with_digest else 0
        octets, layout = payload.numpy(), columns_of(task, segment)
        counts = octets[layout.counts].view(np.int32).reshape(task.chunks, 2)
        wide_offsets = octets[layout.wide_offsets].view(np.uint16)
        wide_values = octets[layout.wide_values].view(WORDS[task.word])
        target, first = host_words(words), task.first_digest_word
        if segment.mode == Mode.SPARSE:
            offsets = octets[layout.offsets].view(np.uint16)
            values = octets[layout.values].view(WORDS[segment.width])
            total = host_kernels.apply_sparse(
                target, counts, offsets, values, wide_offsets, wide_values, with_digest, first
            )
        else:
            planes = octets[layout.values].reshape(segment.width, task.length)
            total = host_kernels.apply_dense(
                target, planes, counts, wide_offsets, wide_values, with_digest, first
            )
        return int(total)

    def digest(self, task: Task, words: torch.Tensor) -> int:
        return int(host_kernels.digest(host_words(words).view(np.uint8), task.first_digest_word))

    def finish(self) -> None:
        """Nothing runs on: host kernels return when they are done."""
