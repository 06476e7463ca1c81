"""Sums over the sequences of a packed batch.

Invariant: results depend on sequence ids only through equality, so packing, order and padding change nothing.
Sums run in float64: a sequence may hold 10^5 tokens, and its ratio is the exponential of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """index: int64 [T], dense sequence number of each token; number: how many sequences."""

    index: Tensor
    number: int

    @staticmethod
    def of(sequence_ids: Tensor) -> Segments:
        """Dense numbers for arbitrary ids. Tokens of a sequence are usually neighbours: then only the runs are sorted."""
        if sequence_ids.numel() == 0:
            return Segments(sequence_ids.long(), 0)
        runs, run_of_token = torch.unique_consecutive(sequence_ids, return_inverse=True)
        ids, id_of_run = torch.unique(runs, return_inverse=True)
        return Segments(id_of_run[run_of_token], ids.numel())

    def total(self, values: Tensor) -> Tensor:
        """Float64 [number]: sum of `values` [T] over each sequence."""
        sums = torch.zeros(self.number, dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self.index, values.double())

    def spread(self, per_sequence: Tensor, dtype: torch.dtype) -> Tensor:
        """[T]: each token's entry of `per_sequence` [number]."""
        return per_sequence.to(dtype)[self.index]
