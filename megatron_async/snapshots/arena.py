"""A preallocated block of host memory that record payloads are carved from.

Allocated once and never grown: page-locked buffers made at every save are what leaks in other trainers. Pages that were
never written cost nothing, so a generous budget is cheap until it is used.

Invariants: blocks never overlap, start at multiples of 64 bytes, and neighbouring free blocks are merged.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass

import torch

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Block:
    """`nbytes` of the arena from `start`; `data` is uint8[nbytes]."""

    start: int
    nbytes: int
    data: torch.Tensor


class HostArena:
    """First-fit allocator over one uint8 tensor; safe to use from several threads."""

    def __init__(self, nbytes: int, pin_memory: bool = False) -> None:
        self.capacity = nbytes // ALIGNMENT * ALIGNMENT
        self._memory = torch.empty(self.capacity, dtype=torch.uint8, pin_memory=pin_memory and nbytes > 0)
        self._free: list[tuple[int, int]] = [(0, self.capacity)] if self.capacity else []
        self._lock = threading.Lock()
        self.used = 0

    def allocate(self, nbytes: int) -> Block | None:
        """A block of at least one byte, or None when no gap is large enough."""
        room = _rounded(nbytes)
        with self._lock:
            for place, (start, length) in enumerate(self._free):
                if length >= room:
                    self._free[place : place + 1] = [(start + room, length - room)] if length > room else []
                    self.used += room
                    return Block(start, nbytes, self._memory[start : start + nbytes])
        return None

    def release(self, block: Block) -> None:
        """Give a block back; it must not be used afterwards."""
        start, length = block.start, _rounded(block.nbytes)
        with self._lock:
            self.used -= length
            place = bisect_left(self._free, (start, 0))
            if place < len(self._free) and self._free[place][0] == start + length:
                length += self._free.pop(place)[1]
            if place > 0 and sum(self._free[place - 1]) == start:
                place -= 1
                before, size = self._free.pop(place)
                start, length = before, size + length
            self._free.insert(place, (start, length))


def _rounded(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
