"""The codec's backend for tensors outside host memory: PyTorch operations on whole tasks, one pass per column.

Stepping and digests never wait for the device: digests come back as tensors, and a walk waits once, at its end.
Device tasks should be large (the store's default is 16 Mi words): the cost is in launches and passes, not in the words.
Scratch is a few times the task, taken from PyTorch's caching allocator. Every operation also runs on host tensors,
which is how its payloads are compared with the compiled backend's.
"""

from __future__ import annotations

import torch

from megatron_async.snapshots import digest
from megatron_async.snapshots.bits import CHUNK, WORD_DTYPES, Task
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
from megatron_async.snapshots.digest import STRIPE


def _signed(value: int) -> int:
    """A 64-bit pattern as the signed integer that PyTorch multiplies with."""
    return value - (1 << 64) if value >= 1 << 63 else value


KEY = _signed(digest.KEY)
MIX_1 = _signed(digest.MIX_1)
MIX_2 = _signed(digest.MIX_2)
LOW = 0xFFFFFFFF


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 (PyTorch's own keeps the sign)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _unsigned(words: torch.Tensor) -> torch.Tensor:
    """Words as non-negative int64."""
    return words.to(torch.int64) & ((1 << (8 * words.element_size())) - 1)


def _octets(column: torch.Tensor) -> torch.Tensor:
    return column.contiguous().reshape(-1).view(torch.uint8)


class DeviceKernels:
    """Implements `codec.Kernels` for any device PyTorch knows."""

    def __init__(self) -> None:
        self._keys: dict[torch.device, torch.Tensor] = {}

    def encode(self, task: Task, old: torch.Tensor, new: torch.Tensor) -> tuple[Segment, torch.Tensor | None]:
        difference = old ^ new
        places = difference.nonzero().reshape(-1)
        if places.numel() == 0:
            return EMPTY, None
        if places.numel() <= int(SPARSE_LIMIT * task.length):
            return self._encode_sparse(task, difference, places)
        return self._encode_dense(task, difference)

    def _encode_sparse(
        self, task: Task, difference: torch.Tensor, places: torch.Tensor
    ) -> tuple[Segment, torch.Tensor]:
        width = narrow_bytes(task.word)
        values = difference[places]
        is_narrow = (_unsigned(values) >> (8 * width)) == 0
        narrow, wide = places[is_narrow], places[~is_narrow]
        segment = Segment(Mode.SPARSE, width, narrow.numel(), wide.numel())
        low = _octets(values[is_narrow]).reshape(-1, task.word)[:, :width]
        return segment, self._assemble(task, segment, narrow, wide, values[~is_narrow], low)

    def _encode_dense(self, task: Task, difference: torch.Tensor) -> tuple[Segment, torch.Tensor]:
        width, smallest = task.word, dense_bytes(task, task.word, 0)
        for candidate in range(1, task.word):
            above = int(((_unsigned(difference) >> (8 * candidate)) != 0).sum())
            if above <= WIDE_LIMIT * task.length and dense_bytes(task, candidate, above) < smallest:
                width, smallest = candidate, dense_bytes(task, candidate, above)
        nowhere = difference.new_empty(0, dtype=torch.int64)
        wide = nowhere
        if width < task.word:
            wide = ((_unsigned(difference) >> (8 * width)) != 0).nonzero().reshape(-1)
        segment = Segment(Mode.DENSE, width, 0, wide.numel())
        wide_values = difference[wide]
        difference[wide] = 0
        planes = _octets(difference).reshape(-1, task.word)[:, :width].t()
        return segment, self._assemble(task, segment, nowhere, wide, wide_values, planes)

    def _assemble(
        self,
        task: Task,
        segment: Segment,
        narrow: torch.Tensor,
        wide: torch.Tensor,
        wide_values: torch.Tensor,
        low: torch.Tensor,
    ) -> torch.Tensor:
        layout = columns_of(task, segment)
        payload = torch.zeros(layout.nbytes, dtype=torch.uint8, device=wide_values.device)
        per_chunk = [torch.bincount(places // CHUNK, minlength=task.chunks) for places in (narrow, wide)]
        payload[layout.counts] = _octets(torch.stack(per_chunk, 1).to(torch.int32))
        payload[layout.wide_values] = _octets(wide_values)
        payload[layout.offsets] = _octets(_offsets(narrow))
        payload[layout.wide_offsets] = _octets(_offsets(wide))
        payload[layout.values] = _octets(low)
        return payload

    def apply(
        self,
        task: Task,
        words: torch.Tensor,
        segment: Segment,
        payload: torch.Tensor | None,
        with_digest: bool,
    ) -> int | torch.Tensor:
        if segment.mode != Mode.EMPTY and payload is not None:
            octets = payload.to(words.device, non_blocking=True)
            layout = columns_of(task, segment)
            counts = octets[layout.counts].view(torch.int32).reshape(task.chunks, 2)
            if segment.mode == Mode.SPARSE:
                places = _places(counts[:, 0], octets[layout.offsets], segment.narrow)
                low = octets[layout.values].reshape(segment.narrow, segment.width)
                words[places] ^= _widen(low, task.word)
            else:
                planes = octets[layout.values].reshape(segment.width, task.length)
                words ^= _widen(planes.t(), task.word)
            places = _places(counts[:, 1], octets[layout.wide_offsets], segment.wide)
            words[places] ^= octets[layout.wide_values].view(words.dtype)
        return self.digest(task, words) if with_digest else 0

    def digest(self, task: Task, words: torch.Tensor) -> torch.Tensor:
        octets = words.view(torch.uint8)
        missing = -octets.numel() % 8
        if missing:
            octets = torch.nn.functional.pad(octets, (0, missing))
        elif octets.storage_offset() % 8:
            octets = octets.clone()
        values = octets.view(torch.int64)
        rows = _stripes(values)
        x = rows ^ self._stripe_keys(words.device)
        # The words that fill the last stripe were zero and must count for nothing: their products are cut off.
        products = (x & LOW) * _shift_right(x, 32)
        products.view(-1)[values.numel() :] = 0
        places = torch.arange(x.shape[0], device=words.device) + task.first_digest_word // STRIPE
        inner = _mix(products.sum(1) ^ (places * KEY + MIX_2))
        return _mix(inner ^ rows.sum(1)).sum()

    def finish(self) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def _stripe_keys(self, device: torch.device) -> torch.Tensor:
        if device not in self._keys:
            self._keys[device] = torch.from_numpy(digest.stripe_keys().view("int64")).to(device)
        return self._keys[device]


def _stripes(values: torch.Tensor) -> torch.Tensor:
    """int64[n] as rows of `STRIPE`, the last filled with zeros."""
    missing = -values.numel() % STRIPE
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).reshape(-1, STRIPE)


def _mix(t: torch.Tensor) -> torch.Tensor:
    t = (t ^ _shift_right(t, 30)) * MIX_1
    t = (t ^ _shift_right(t, 27)) * MIX_2
    return t ^ _shift_right(t, 31)


def _offsets(places: torch.Tensor) -> torch.Tensor:
    """The low 16 bits of word positions, as the bit pattern of int16."""
    return _octets(places).reshape(-1, 8)[:, :2].contiguous().view(torch.int16)


def _places(counts: torch.Tensor, offsets: torch.Tensor, total: int) -> torch.Tensor:
    """Word positions in the task from entries per chunk and 16-bit offsets; total: entries, known without waiting."""
    chunks = torch.arange(counts.numel(), device=counts.device)
    within = offsets.view(torch.int16).to(torch.int64) & 0xFFFF
    return torch.repeat_interleave(chunks, counts.to(torch.int64), output_size=total) * CHUNK + within


def _widen(low: torch.Tensor, word: int) -> torch.Tensor:
    """uint8[n, width], the low bytes of words, as n words."""
    full = low.new_zeros(low.shape[0], word)
    full[:, : low.shape[1]] = low
    return full.view(WORD_DTYPES[word][0]).reshape(-1)
