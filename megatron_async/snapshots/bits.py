"""Named tensors seen as flat arrays of words, cut into tasks.

Invariants
- A word is 1, 2 or 4 bytes: the element for 1-, 2- and 4-byte dtypes, half or quarter of it for wider ones. Only bits
  count; NaN payloads, signed zeros and fp8 patterns are words like any others.
- Tensors are contiguous and share no memory: a XOR applied twice through two names would undo itself.
- The task grid depends on names, dtypes, shapes and `task_words` alone, so that any two records of one store agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megatron_async.snapshots.errors import TensorSetError

CHUNK = 65536
"""Words per chunk: a 16-bit offset addresses every word of one, so no record can point outside it."""

GROUP_SLACK = 64
"""Entries a list may exceed its limit by before the encoder notices: it looks after every 64 words."""

WORD_DTYPES = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}


@dataclass(frozen=True, slots=True)
class Task:
    """A run of words of one tensor, the unit that is encoded, applied and moved between tiers."""

    tensor: int
    start: int
    length: int
    word: int

    @property
    def chunks(self) -> int:
        return -(-self.length // CHUNK)

    @property
    def first_digest_word(self) -> int:
        """Index of the task's first 64-bit word in its tensor."""
        return self.start * self.word // 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What two runs must agree on before their records mean the same thing."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    word: int


def word_bytes(tensor: torch.Tensor) -> int:
    """Bytes per word for this dtype: the widest of 1, 2, 4 that divides the element."""
    size = tensor.element_size()
    return size if size in WORD_DTYPES else 4


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as a flat integer tensor that shares its memory (uint8, int16 or int32)."""
    return tensor.detach().reshape(-1).view(WORD_DTYPES[word_bytes(tensor)][0])


def host_words(words: torch.Tensor) -> np.ndarray:
    """A host word tensor as an unsigned NumPy array that shares its memory."""
    return words.numpy().view(WORD_DTYPES[words.element_size()][1])


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what cannot be stepped in place.

    Raises:
        TensorSetError: a tensor is not strided and contiguous, lives on another device than the first, or shares
            memory with one before it.
    """
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise TensorSetError(
            f"tensors lie on several devices ({', '.join(sorted(map(str, devices)))}); use one store per device"
        )
    spans: list[tuple[int, int, str]] = []
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise TensorSetError(
                f"tensor '{name}' of shape {tuple(tensor.shape)} and strides {_strides(tensor)} is not contiguous; "
                "records step bits in place, so pass the contiguous storage that the model reads, not a view of it"
            )
        size = tensor.numel() * tensor.element_size()
        if size:
            spans.append((tensor.data_ptr(), tensor.data_ptr() + size, name))
    spans.sort()
    for (_, end, name), (begin, _, other) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise TensorSetError(
                f"tensors '{name}' and '{other}' share memory (tied weights?); pass it under one name only, "
                "because a difference applied through both names would undo itself"
            )


def _strides(tensor: torch.Tensor) -> object:
    return tuple(tensor.stride()) if tensor.layout == torch.strided else tensor.layout


def specs_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """One specification per tensor, in the mapping's order."""
    return tuple(
        TensorSpec(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.numel() * tensor.element_size(),
            word_bytes(tensor),
        )
        for name, tensor in tensors.items()
    )


def signature(specs: tuple[TensorSpec, ...], task_words: int) -> str:
    """A short text that is equal exactly when names, dtypes, shapes and the task grid are."""
    rows = [[spec.name, spec.dtype, list(spec.shape)] for spec in specs]
    return hashlib.sha256(json.dumps([task_words, rows]).encode()).hexdigest()[:32]


def task_grid(specs: tuple[TensorSpec, ...], task_words: int) -> tuple[Task, ...]:
    """Cut every tensor into runs of at most `task_words` words (a multiple of `CHUNK`); empty tensors have none."""
    if task_words <= 0 or task_words % CHUNK:
        raise TensorSetError(f"task_words is {task_words}; it must be a positive multiple of {CHUNK}")
    grid = []
    for index, spec in enumerate(specs):
        words = spec.nbytes // spec.word
        grid += [
            Task(index, start, min(task_words, words - start), spec.word)
            for start in range(0, words, task_words)
        ]
    return tuple(grid)
