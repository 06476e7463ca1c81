"""Packing: every sequence once, no budget exceeded, ranks alike; tight on long-tailed lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.engine.packing import PackingError, pack


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    budget=st.integers(64, 200),
    ranks=st.integers(1, 6),
    count_multiple=st.integers(1, 3),
    length_multiple=st.sampled_from([1, 4, 8]),
)
def test_every_sequence_once_within_budget_and_equal_counts(
    lengths: list[int], budget: int, ranks: int, count_multiple: int, length_multiple: int
) -> None:
    plan = pack(
        lengths, budget=budget, ranks=ranks, count_multiple=count_multiple, length_multiple=length_multiple
    )

    def size(micro_batch: tuple[int, ...]) -> int:
        return sum(-(-lengths[i] // length_multiple) * length_multiple for i in micro_batch)

    members = [i for rank in plan.micro_batches for micro_batch in rank for i in micro_batch]
    assert sorted(members) == list(range(len(lengths)))
    assert all(size(micro_batch) <= budget for rank in plan.micro_batches for micro_batch in rank)
    assert len(plan.micro_batches) == ranks
    used = sum(bool(micro_batch) for rank in plan.micro_batches for micro_batch in rank)
    padded = sum(size(micro_batch) for rank in plan.micro_batches for micro_batch in rank)
    assert plan.fill == pytest.approx(padded / (used * budget))
    counts = {len(rank) for rank in plan.micro_batches}
    assert len(counts) == 1 and counts.pop() % count_multiple == 0


def test_long_tailed_lengths_fill_the_budget() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.0, 1.0, 512), 8, 4096).astype(int).tolist()
    plan = pack(lengths, budget=4096, ranks=1)
    assert plan.fill >= 0.95


def test_ranks_carry_alike_loads() -> None:
    lengths = np.random.default_rng(1).integers(50, 400, 128).tolist()
    plan = pack(lengths, budget=2048, ranks=4)
    totals = [sum(lengths[i] for micro_batch in rank for i in micro_batch) for rank in plan.micro_batches]
    assert max(totals) <= 1.02 * min(totals)


def test_fewer_sequences_than_ranks_leaves_empty_micro_batches() -> None:
    plan = pack([5, 9], budget=16, ranks=4)
    assert sorted(plan.micro_batches) == [((),), ((),), ((0,),), ((1,),)]


def test_same_plan_whatever_process_computes_it() -> None:
    lengths = [7, 7, 7, 3, 3, 9]
    assert pack(lengths, budget=16, ranks=2) == pack(list(lengths), budget=16, ranks=2)


def test_too_long_a_sequence_names_it_and_the_setting() -> None:
    with pytest.raises(PackingError, match=r"sequence 1 takes 70 tokens.*\(64\).*micro_batch_tokens"):
        pack([3, 70], budget=64)
    with pytest.raises(PackingError, match="no sequences"):
        pack([], budget=64)
