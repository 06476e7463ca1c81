"""Distances between versions when ids do not count updates: `training.lineage`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.bank.lineage import Lineage


def test_what_waits_over_two_resumes_is_needed_as_long_as_it_is_within_the_bound() -> None:
    """Killed twice at version 6 with a checkpoint of 2: 7..10 and 11..14 repeat the lost steps."""
    line = Lineage([(0, None), *((version, version - 1) for version in range(1, 7))])
    for first in (7, 11):
        line.add(first, 2)
        for version in range(first + 1, first + 4):
            line.add(version, version - 1)
        assert line.oldest_within(first + 3, 2) == 4
        assert line.gaps(first + 3, np.array([3, 4, 5, 6])).tolist() == [3, 2, 1, 0]
    assert [line.updates(version) for version in (0, 2, 6, 10, 14, 99)] == [0, 2, 6, 6, 6, 6]
    assert [version for version in range(20) if line.lost(version, 14)] == [3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_a_straight_line_counts_back(gap: int) -> None:
    line = Lineage([(0, None), *((version, version - 1) for version in range(1, 8))])
    assert [line.oldest_within(version, gap) for version in range(gap + 1, 8)] == list(range(1, 8 - gap))


@given(st.data())
def test_nothing_within_the_gap_lies_below_the_oldest(data: st.DataObject) -> None:
    parents = [data.draw(st.integers(0, made)) for made in range(data.draw(st.integers(1, 12)))]
    line = Lineage([(0, None), *((made + 1, parent) for made, parent in enumerate(parents))])
    current, gap = data.draw(st.integers(0, len(parents))), data.draw(st.integers(0, 4))
    oldest = line.oldest_within(current, gap)
    near = line.gaps(current, np.arange(len(parents) + 1)) <= gap
    assert not near[: max(oldest, 0)].any(), "an id below `oldest` is within the gap"
    assert oldest <= 0 or near[oldest], "`oldest` itself is not"
