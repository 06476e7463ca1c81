"""Distances between versions when ids do not count updates: `training.lineage`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.training.lineage import Lineage


def test_a_resumed_run_keeps_what_waited_through_its_start() -> None:
    # Killed at its third update and resumed from the first version: 0 lies two updates behind 5.
    line = Lineage([(0, None), (1, 0), (2, 1), (3, 2)])
    line.add(4, 0, sampled=False)
    line.add(5, 4)
    assert line.oldest_within(5, 2) <= 0
    assert line.oldest_within(5, 1) == 1


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_a_straight_line_counts_back(gap: int) -> None:
    line = Lineage([(0, None), *((version, version - 1) for version in range(1, 8))])
    assert [line.oldest_within(version, gap) for version in range(gap + 1, 8)] == list(range(1, 8 - gap))


@given(st.data())
def test_what_is_old_enough_to_refuse_is_refused_and_nothing_else(data: st.DataObject) -> None:
    parents = [data.draw(st.integers(0, made)) for made in range(data.draw(st.integers(1, 12)))]
    line = Lineage([(0, None), *((made + 1, parent) for made, parent in enumerate(parents))])
    current, gap = data.draw(st.integers(0, len(parents))), data.draw(st.integers(0, 4))
    oldest = line.oldest_within(current, gap)
    far = line.gaps(current, np.arange(len(parents) + 1)) > gap
    assert not far[max(oldest, 0) :].any(), "an id from `oldest` on lies too far back"
    assert oldest <= 0 or far[oldest - 1], "the id before `oldest` would have been near enough"
