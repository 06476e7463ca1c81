"""What a background save consists of: copies of the tensors on the host, and threads that write them to files.

Invariants:
- The copies' memory is allocated once and used again by every save: after the first, a save allocates nothing for what
  lies whole on this rank, and its pages are never fetched anew.
- Threads of this process write, nothing is forked: no page that training writes to has to be duplicated first, and a
  kill ends the writing with the trainer.
- An error while writing reaches all ranks when the save is finished.
"""

import queue
import threading
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.utils import nested_values
from torch import Tensor

from megatron_async.engine import platform

Place = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Which part of which tensor: key, offset, shape, precision."""


class HostCopies:
    """Buffers on the host, one for each tensor that this rank writes; page-locked where there is a GPU."""

    def __init__(self) -> None:
        self._held: dict[Place, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._held.values())

    @torch.no_grad()
    def take(self, state: dict[Any, Any] | list[Any]) -> None:
        """Put copies in place of the tensors in ``state`` (descriptions of sharded tensors, nested) that this rank
        writes. On a GPU the copying is queued: synchronize before the originals change."""
        # Tensors that are stored in parts must be cut first: Megatron copies a view of a buffer once more.
        apply_factories(state)
        for entry in nested_values(state):
            if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id):
                entry.data = self._buffer(entry).copy_(entry.data, non_blocking=True)

    def _buffer(self, entry: ShardedTensor) -> Tensor:
        assert entry.data is not None, "what is saved has data"
        place = (entry.key, tuple(entry.global_offset), tuple(entry.data.shape), entry.data.dtype)
        if place not in self._held:
            pinned = platform.setup().is_gpu
            self._held[place] = torch.empty(entry.data.shape, dtype=entry.data.dtype, pin_memory=pinned)
        return self._held[place]


class BackgroundWrite:
    """One save under way, after planning: starts writing at once, each of the rank's files in a thread."""

    def __init__(self, request: AsyncRequest, results: queue.Queue[Any]) -> None:
        self._request = request
        self._results = results
        self._threads: list[threading.Thread] = []
        self._outcomes: queue.Queue[Any] = queue.Queue()
        if request.async_fn is None:  # nothing of it is this rank's to write
            return
        transforms, _ = request.async_fn.args  # type: ignore[attr-defined]
        buckets = request.async_fn_args[1] if request.preload_fn is None else request.preload_fn()
        for number, bucket in enumerate(buckets):
            arguments = (transforms, number, bucket)
            # A daemon: a run that ends with an error does not wait for files that will not count.
            thread = threading.Thread(target=self._write, args=arguments, name=f"save-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def is_done(self) -> bool:
        """Whether all ranks have written; collective."""
        busy = any(thread.is_alive() for thread in self._threads)
        writing = torch.tensor([int(busy)], device=platform.setup().device)
        dist.all_reduce(writing)
        return not bool(writing.item())

    def finish(self) -> None:
        """Wait for the files, gather what was written, complete the checkpoint. Collective.

        Raises what any rank met while writing.
        """
        for thread in self._threads:
            thread.join()
        if self._threads:
            self._results.put(self._gathered())
        for finalize in self._request.finalize_fns:
            finalize()

    def _write(self, transforms: list[Any], number: int, bucket: Any) -> None:
        # Megatron's function without the decorator that stops garbage collection, here of the whole trainer.
        write = filesystem_async.FileSystemWriterAsync.write_preloaded_data.__wrapped__  # type: ignore[attr-defined]
        under_way: queue.Queue[int] = queue.Queue()
        under_way.put(number)
        write(transforms, number, bucket, self._outcomes, under_way, use_fsync=True)

    def _gathered(self) -> dict[int, Any] | Exception:
        """Results by file, or the first error."""
        outcomes = [self._outcomes.get() for _ in self._threads]
        errors = [outcome for _, outcome in outcomes if isinstance(outcome, Exception)]
        return errors[0] if errors else dict(outcomes)
