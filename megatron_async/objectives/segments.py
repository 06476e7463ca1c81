"""Sums over groups of the packed tokens: the sequences of a batch, or its version gaps.

Invariant: results depend on ids only through equality, so packing, order and padding change nothing. Sums run in
float64: a sequence may hold 10^5 tokens, and its ratio is the exponential of their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Tokens grouped by id, as runs of neighbours with one id (a sequence is usually one run).

    tokens, number: how many tokens T, how many segments. ids: int64 [number]. run_lengths, run_segment: int64 [runs],
    tokens of each run and the segment it belongs to.
    """

    tokens: int
    number: int
    ids: Tensor
    run_lengths: Tensor
    run_segment: Tensor

    @staticmethod
    def of(ids: Tensor) -> Segments:
        """Segments numbered by increasing id; any int64 ids, in any order."""
        runs, lengths = torch.unique_consecutive(ids, return_counts=True)
        distinct, segment_of_run = torch.unique(runs, return_inverse=True)
        return Segments(ids.numel(), distinct.numel(), distinct, lengths, segment_of_run)

    @property
    def index(self) -> Tensor:
        """int64 [T]: dense segment number of each token."""
        return self._over_runs(self.run_segment)

    def _over_runs(self, per_run: Tensor) -> Tensor:
        return torch.repeat_interleave(per_run, self.run_lengths, output_size=self.tokens)

    def total(self, values: Tensor) -> Tensor:
        """Float64 [number]: sum of `values` [T] over each segment."""
        sums = torch.zeros(self.number, dtype=torch.float64, device=values.device)
        if values.numel() == 0:
            return sums
        # counts are exact in float32 up to 2^24 tokens of one run
        exact = values.float() if values.dtype == torch.bool else values.double()
        by_run = torch.segment_reduce(exact, "sum", lengths=self.run_lengths, unsafe=True)
        return sums.index_add_(0, self.run_segment, by_run.double())

    def spread(self, per_segment: Tensor, dtype: torch.dtype) -> Tensor:
        """[T]: each token's entry of `per_segment` [number]."""
        return self._over_runs(per_segment.to(dtype).index_select(0, self.run_segment))
