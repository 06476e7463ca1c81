"""Which versions a batch visits, and how far each trajectory is forwarded under each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.snapshots import SnapshotError, UnknownVersionError
from megatron_async.snapshots.schedule import Visit, plan_visits

SPANS = [(0, 7, 56), (0, 8, 89), (0, 9, 127), (1, 9, 40)]


def test_newest_first_each_up_to_its_last_token() -> None:
    schedule = plan_visits(SPANS, live=9, available=[7, 8, 9])
    assert schedule.visits == (Visit(9, (0, 1), (128, 41)), Visit(8, (0,), (90,)), Visit(7, (0,), (57,)))
    assert (schedule.shards, schedule.tokens, schedule.whole_tokens) == (4, 316, 425)


def test_the_live_version_is_left_out_when_training_gives_its_log_probs() -> None:
    schedule = plan_visits(SPANS, live=9, reuse_live=True)
    assert schedule.versions == (8, 7)
    assert (schedule.shards, schedule.reused, schedule.tokens) == (4, 2, 147)


def test_a_version_that_comes_twice_counts_to_its_last_token() -> None:
    """Version 3 sampled two turns, with 4 between them (two engines, one behind)."""
    schedule = plan_visits([(5, 3, 10), (5, 4, 20), (5, 3, 30)], live=4)
    assert schedule.visits == (Visit(4, (5,), (21,)), Visit(3, (5,), (31,)))


def test_what_cannot_be_restored_is_named_before_anything_moves() -> None:
    with pytest.raises(
        UnknownVersionError, match=r"versions \[7\] of trajectories \[0\].*available: \[8, 9\]"
    ):
        plan_visits(SPANS, live=9, available=[8, 9])
    with pytest.raises(SnapshotError, match="position -1"):
        plan_visits([(0, 1, -1)], live=1)
    assert plan_visits([], live=3).visits == ()


def test_tokens_of_versions_that_a_crash_took_back_are_scored_too() -> None:
    """The run came back at version 8; 9 was published before the crash and is in the store beside it."""
    assert plan_visits(SPANS, live=8, available=[7, 8, 9]).versions == (9, 8, 7)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 99)), max_size=40), st.booleans()
)
def test_every_token_is_covered_once_and_none_in_vain(uses: list[tuple[int, int, int]], reuse: bool) -> None:
    schedule = plan_visits(uses, live=9, reuse_live=reuse)
    assert list(schedule.versions) == sorted(set(schedule.versions), reverse=True)
    planned = {
        (trajectory, visit.version): length
        for visit in schedule.visits
        for trajectory, length in zip(visit.trajectories, visit.lengths, strict=True)
    }
    wanted = {
        (t, v): 1 + max(p for t2, v2, p in uses if (t2, v2) == (t, v))
        for t, v, _ in uses
        if not (reuse and v == 9)
    }
    assert planned == wanted
    assert schedule.tokens == sum(wanted.values()) <= schedule.whole_tokens
    assert schedule.shards == len(wanted) + schedule.reused
