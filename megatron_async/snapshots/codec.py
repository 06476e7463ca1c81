"""Lossless differences between two versions of the weights.

A segment is the XOR of one task's words in two versions, in the form that was measured to be smallest:

=========  ==============================================================================================
`EMPTY`    nothing differs; no payload
`SPARSE`   a 16-bit offset per changed word in its chunk of 65,536, and the XOR: narrow where its low half (low byte
           for 2-byte words) holds all of it, wide otherwise
`DENSE`    the low `width` bytes of every XOR, as planes; words that need more bytes follow in the wide list
=========  ==============================================================================================

Any of the two with a payload may be compressed (zstd) where bytes cost more than time: on the way to disk, or in
memory with `compress_in_memory`.

Invariants
- XOR is its own inverse: applying a segment to the words of either version gives the other's, in place.
- Applying the same segment twice gives the words one began with, whatever the segment holds; this is how a failed walk
  is taken back.
- The layout of a payload follows from the segment's numbers alone, so every backend reads every other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
import zstandard

from megatron_async.snapshots.bits import Task
from megatron_async.snapshots.errors import DamagedRecordError

SPARSE_LIMIT = 0.25
"""Largest share of changed words that is listed; above it the planes apply faster and are hardly larger."""

WIDE_LIMIT = 0.125
"""Largest share of words in the wide list of a dense segment."""


class Mode(IntEnum):
    EMPTY = 0
    SPARSE = 1
    DENSE = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """The difference of one task between two versions; what it says without its payload.

    Attributes:
        mode: see the module's table.
        width: bytes per entry of the narrow list, or planes of a dense segment.
        narrow, wide: entries in the two lists (`narrow` is 0 for a dense segment).
    """

    mode: Mode
    width: int = 0
    narrow: int = 0
    wide: int = 0


EMPTY = Segment(Mode.EMPTY)


@dataclass(frozen=True, slots=True)
class Columns:
    """Byte ranges of a payload's columns, each starting at a multiple of eight."""

    counts: slice
    wide_values: slice
    offsets: slice
    wide_offsets: slice
    values: slice
    nbytes: int


def narrow_bytes(word: int) -> int:
    """Bytes of a narrow entry: half a word, at least one."""
    return max(1, word // 2)


def columns_of(task: Task, segment: Segment) -> Columns:
    """Where the columns of this segment's payload lie."""
    entries = segment.narrow if segment.mode == Mode.SPARSE else task.length
    counts = slice(0, task.chunks * 8)
    wide_values = _following(counts, segment.wide * task.word)
    offsets = _following(wide_values, segment.narrow * 2)
    wide_offsets = _following(offsets, segment.wide * 2)
    values = _following(wide_offsets, segment.width * entries)
    return Columns(counts, wide_values, offsets, wide_offsets, values, _following(values, 0).start)


def _following(column: slice, nbytes: int) -> slice:
    """The next column, from the next multiple of eight on."""
    start = -(-column.stop // 8) * 8
    return slice(start, start + nbytes)


def dense_bytes(task: Task, width: int, wide: int) -> int:
    """Size of a dense payload with this many planes and wide entries, before alignment."""
    return task.chunks * 8 + task.length * width + wide * (2 + task.word)


def check_counts(segment: Segment, counts: np.ndarray) -> None:
    """Refuse a payload whose chunk counts do not add up to its segment's.

    Args:
        counts: int32[chunks, 2].

    Raises:
        DamagedRecordError: they do not, or one is negative.
    """
    sums = counts.sum(0, dtype=np.int64)
    if counts.min(initial=0) < 0 or sums[0] != segment.narrow or sums[1] != segment.wide:
        raise DamagedRecordError(
            f"entries per chunk add up to {sums.tolist()}, the segment says {[segment.narrow, segment.wide]}"
        )


def changed_share(grid: Sequence[Task], segments: Sequence[Segment]) -> float:
    """Share of words that differ; dense tasks, where they are not counted, count in full."""
    counted = 0
    for task, segment in zip(grid, segments, strict=True):
        counted += task.length if segment.mode == Mode.DENSE else segment.narrow + segment.wide
    return counted / max(1, sum(task.length for task in grid))


class Kernels(Protocol):
    """What a backend does with the words of one task. `words` are flat integer tensors of one task."""

    def encode(self, task: Task, old: torch.Tensor, new: torch.Tensor) -> tuple[Segment, torch.Tensor | None]:
        """The difference and its payload (uint8, on the words' device; valid until this thread's next encode)."""

    def apply(
        self,
        task: Task,
        words: torch.Tensor,
        segment: Segment,
        payload: torch.Tensor | None,
        with_digest: bool,
    ) -> int | torch.Tensor:
        """Toggle the words in place; returns the task's digest afterwards (0 without `with_digest`)."""

    def digest(self, task: Task, words: torch.Tensor) -> int | torch.Tensor:
        """The task's part of its tensor's digest: a sum modulo 2^64, perhaps still being computed."""

    def finish(self) -> None:
        """Wait until everything asked for is done, and payloads may be freed."""


def compress(payload: np.ndarray, level: int) -> bytes | None:
    """The payload compressed, or None unless that saves at least a tenth."""
    packed = zstandard.ZstdCompressor(level=level).compress(payload.tobytes())
    return packed if len(packed) < 0.9 * payload.size else None


def decompress(packed: bytes | memoryview, nbytes: int) -> np.ndarray:
    """Undo `compress`; the result is a fresh uint8 array of `nbytes`.

    Raises:
        DamagedRecordError: the bytes are not a frame of that size.
    """
    try:
        octets = zstandard.ZstdDecompressor().decompress(packed, max_output_size=nbytes)
    except zstandard.ZstdError as error:
        raise DamagedRecordError(
            f"compressed segment of {len(packed)} bytes cannot be read: {error}"
        ) from error
    if len(octets) != nbytes:
        raise DamagedRecordError(f"compressed segment holds {len(octets)} bytes, its record says {nbytes}")
    return np.frombuffer(octets, np.uint8)
