"""Token-budget packing of sequences into micro-batches, balanced over data-parallel ranks. Pure logic.

Invariants:
- Every sequence is in exactly one micro-batch; no micro-batch exceeds the budget.
- All ranks get the same number of micro-batches (the mixture of experts' and the pipeline's collectives need it);
  one that is left over is empty.
- The result depends on the lengths alone, so every rank computes the same plan without talking.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_async.errors import UserError


class PackingError(UserError):
    """A sequence that no micro-batch can hold."""


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """``micro_batches[rank][i]`` = indices of the sequences in that rank's i-th micro-batch.

    Attributes:
        fill: tokens / (micro-batches that hold any, over all ranks · budget).
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    fill: float


def pack(
    lengths: Sequence[int], *, budget: int, ranks: int = 1, count_multiple: int = 1, length_multiple: int = 1
) -> PackingPlan:
    """Plan the micro-batches of one global batch.

    First-fit decreasing finds how few bins suffice; the bins of that number (rounded up to what the ranks need) are
    then filled longest first into the emptiest, so that micro-batches are alike in size.

    Args:
        lengths: tokens per sequence.
        budget: most tokens in one micro-batch.
        ranks: data-parallel ranks.
        count_multiple: micro-batches per rank are a multiple of this (interleaved pipelines want the stages).
        length_multiple: each sequence occupies its length rounded up to this (context parallel: 2·size).

    Raises:
        PackingError: no sequences, or one longer than the budget.

    >>> pack([6, 5, 3, 2], budget=8, ranks=2).micro_batches
    (((0, 3),), ((1, 2),))
    """
    if not lengths:
        raise PackingError("there are no sequences to pack")
    sizes = [-(-n // length_multiple) * length_multiple for n in lengths]
    longest = max(sizes)
    if longest > budget:
        raise PackingError(
            f"sequence {sizes.index(longest)} takes {longest} tokens, more than one micro-batch holds "
            f"({budget}); raise trainer.micro_batch_tokens or lower rollout.max_tokens"
        )
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    packed = _first_fit(order, sizes, budget)
    per_rank = math.ceil(math.ceil(len(packed) / ranks) / count_multiple) * count_multiple
    bins = _level(order, sizes, budget, per_rank * ranks) or packed
    fill = sum(sizes) / (budget * sum(map(bool, bins)))
    return PackingPlan(_deal(bins, sizes, ranks, per_rank), fill)


def _first_fit(order: list[int], sizes: list[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        target = next((b for b, free in enumerate(room) if free >= sizes[i]), None)
        if target is None:
            bins.append([])
            room.append(budget)
            target = len(bins) - 1
        bins[target].append(i)
        room[target] -= sizes[i]
    return bins


def _level(order: list[int], sizes: list[int], budget: int, count: int) -> list[list[int]] | None:
    """Longest first into the emptiest of ``count`` bins; None if a bin would overflow."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for i in order:
        target = min(range(count), key=loads.__getitem__)
        if loads[target] + sizes[i] > budget:
            return None
        bins[target].append(i)
        loads[target] += sizes[i]
    return bins


def _deal(
    bins: list[list[int]], sizes: list[int], ranks: int, per_rank: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Deal bins to ranks round by round: alike within a round, and totals level over the rounds."""
    loads = {id(b): sum(sizes[i] for i in b) for b in bins}
    ordered = sorted(bins, key=lambda b: (-loads[id(b)], b))
    ordered += [[] for _ in range(ranks * per_rank - len(ordered))]
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(ordered), ranks):
        emptiest_first = sorted(range(ranks), key=lambda r: (totals[r], r))
        for rank, members in zip(emptiest_first, ordered[start : start + ranks], strict=True):
            dealt[rank].append(tuple(sorted(members)))
            totals[rank] += sum(sizes[i] for i in members)
    return tuple(map(tuple, dealt))
