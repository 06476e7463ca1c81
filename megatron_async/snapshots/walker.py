"""Steps tensors in place along records, with digests and a way back.

Invariants
- All records of a walk pass over a task before the next task begins, so that a walk of many steps reads and writes the
  weights once.
- When anything fails, what was applied is applied again in reverse, and the tensors hold the bits they held before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
import xxhash

from megatron_async.snapshots.bits import Task, TensorSpec, specs_of, task_grid, words_of
from megatron_async.snapshots.codec import Kernels, Mode
from megatron_async.snapshots.device_backend import DeviceKernels
from megatron_async.snapshots.errors import TensorSetError
from megatron_async.snapshots.host_backend import HostKernels
from megatron_async.snapshots.tiers import Record, RecordBuilder

MASK = (1 << 64) - 1
HOST_TASK_WORDS = 1 << 22
"""Most matrices of a mixture of experts are one task: a call costs as much as 30,000 sparsely changed words do."""
DEVICE_TASK_WORDS = 1 << 24

Result = TypeVar("Result")


class Weights:
    """A set of tensors cut into tasks, and the kernels and threads that work on them.

    Tensors in host memory go through compiled kernels, all others through PyTorch operations.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, task_words: int | None, threads: int) -> None:
        on_host = all(tensor.device.type == "cpu" for tensor in tensors.values())
        self.kernels: Kernels = HostKernels() if on_host else DeviceKernels()
        self.task_words = task_words or (HOST_TASK_WORDS if on_host else DEVICE_TASK_WORDS)
        self.specs: tuple[TensorSpec, ...] = specs_of(tensors)
        self.grid = task_grid(self.specs, self.task_words)
        self._tensors = dict(tensors)
        self.words = [words_of(tensor) for tensor in tensors.values()]
        self._parts = {task: self.of(task, self.words) for task in self.grid}
        self.nbytes = sum(spec.nbytes for spec in self.specs)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "snapshot") if threads > 1 else None

    def of(self, task: Task, words: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """The words of a task, in these weights or in a set of the same shape."""
        if words is None:
            return self._parts[task]
        return words[task.tensor][task.start : task.start + task.length]

    def run(self, work: Callable[[int, Task], Result], tasks: Sequence[int] | None = None) -> list[Result]:
        """Call `work(index, task)` for every task of the grid, over the threads; the first error is raised last."""
        indices = range(len(self.grid)) if tasks is None else tasks
        if self._pool is None:
            return [work(index, self.grid[index]) for index in indices]
        futures = [self._pool.submit(work, index, self.grid[index]) for index in indices]
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def check_memory(self) -> None:
        """Raise TensorSetError when a tensor's data was replaced: the store would step memory that nobody reads."""
        for (name, tensor), words in zip(self._tensors.items(), self.words, strict=True):
            if tensor.data_ptr() != words.data_ptr():
                raise TensorSetError(
                    f"the data of tensor '{name}' was replaced after the store was opened (param.data = ..., a move to "
                    "another device?). Write weights in place, or open the store again"
                )

    def copy(self, owned: Sequence[bool]) -> list[torch.Tensor]:
        """A second set of words with the same bits; nothing of tensors that are not owned."""
        pairs = zip(self.words, owned, strict=True)
        return [words.clone() if mine else words.new_empty(0) for words, mine in pairs]

    def digests(self, words: Sequence[torch.Tensor] | None = None) -> np.ndarray:
        """uint64[tensors]: the position-sensitive digest of every tensor's bits."""
        return self.per_tensor(self.run(lambda _, task: self.kernels.digest(task, self.of(task, words))))

    def per_tensor(self, parts: Sequence[int | torch.Tensor]) -> np.ndarray:
        """Add the digests of tasks up to digests of tensors."""
        sums = [0] * len(self.specs)
        for task, part in zip(self.grid, parts, strict=True):
            sums[task.tensor] = (sums[task.tensor] + int(part)) & MASK
        return np.array(sums, np.uint64)

    def encode(
        self, index: int, old: torch.Tensor, new: torch.Tensor, builder: RecordBuilder | None
    ) -> int | torch.Tensor:
        """Store the difference of one task in a record (unless None), and return the task's digest of `new`.

        Raises:
            BudgetExceededError: no tier has room.
        """
        task = self.grid[index]
        total = self.kernels.digest(task, new)
        if builder is not None:
            builder.add(index, *self.kernels.encode(task, old, new))
        return total

    def _toggle(self, index: int, words: torch.Tensor, record: Record) -> None:
        payload = record.payload(index, self.grid[index])
        self.kernels.apply(self.grid[index], words, record.segments[index], payload, with_digest=False)

    def walk(
        self, records: Sequence[Record], *, with_digest: bool, words: Sequence[torch.Tensor] | None = None
    ) -> np.ndarray | None:
        """Apply records one after another to these weights, or to a set of words of the same shape.

        Returns:
            The digests of the tensors afterwards, None without `with_digest`.

        Raises:
            DamagedRecordError: a payload could not be read; the tensors are as they were.
        """
        done: list[tuple[int, Record]] = []

        def work(index: int, task: Task) -> int | torch.Tensor:
            target: torch.Tensor = self.of(task, words)
            total: int | torch.Tensor = 0
            active = [record for record in records if record.segments[index].mode != Mode.EMPTY]
            for place, record in enumerate(active):
                last = with_digest and place == len(active) - 1
                payload = record.payload(index, task)
                total = self.kernels.apply(task, target, record.segments[index], payload, with_digest=last)
                done.append((index, record))
            return total if active or not with_digest else self.kernels.digest(task, target)

        try:
            parts = self.run(work)
            self.kernels.finish()
        except BaseException:
            for index, record in done:
                self._toggle(index, self.of(self.grid[index], words), record)
            raise
        return self.per_tensor(parts) if with_digest else None

    def overwrite(self, source: Callable[[int, Task], torch.Tensor]) -> None:
        """Replace the bits of every task by those of `source(index, task)`."""
        self.run(lambda index, task: self.of(task).copy_(source(index, task)))

    def stepped(self, index: int, record: Record) -> torch.Tensor:
        """The words of one task after a step along a record, in fresh memory."""
        words = self.of(self.grid[index]).clone()
        self._toggle(index, words, record)
        return words

    def expand(self, keyframe: Record, index: int, task: Task) -> torch.Tensor:
        """The words of one task of a keyframe, in fresh memory."""
        words = torch.zeros_like(self.of(task))
        self._toggle(index, words, keyframe)
        return words

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def version_digest(specs: Sequence[TensorSpec], digests: np.ndarray) -> str:
    """One text for all bits of a version: xxh3-128 over names, dtypes, shapes and the tensors' digests."""
    hasher = xxhash.xxh3_128()
    for spec, value in zip(specs, digests.tolist(), strict=True):
        hasher.update(f"{spec.name}\0{spec.dtype}\0{spec.shape}\0{value:016x}\n".encode())
    return hasher.hexdigest()
