"""Walks over the graph of versions, and what may be removed from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_async.snapshots.graph import Step, plan, removable


def test_a_line_is_walked_record_by_record() -> None:
    parents = {1: (0, 1.0), 2: (1, 1.0), 3: (2, 1.0)}
    assert plan(3, 1, parents, {}) == [Step(3, False, 2), Step(2, False, 1)]
    assert plan(0, 2, parents, {}) == [Step(1, False, 1), Step(2, False, 2)]
    assert plan(2, 2, parents, {}) == []


def test_branches_after_a_resume_meet_at_their_common_ancestor() -> None:
    """Versions 4 and 5 were lost to a crash; 6 continues from 3."""
    parents = {4: (3, 1.0), 5: (4, 1.0), 6: (3, 1.0)}
    steps = plan(6, 5, parents, {})
    assert steps is not None
    assert [step.to for step in steps] == [3, 4, 5]


def test_a_full_copy_is_entered_when_it_is_cheaper_or_the_only_way() -> None:
    parents = {version: (version - 1, 0.7) for version in range(1, 9)}
    assert plan(0, 8, parents, {8: 1.0}) == [Step(8, True, 8)]
    assert plan(7, 8, parents, {8: 1.0}) == [Step(8, False, 8)]
    del parents[5]
    assert plan(8, 3, parents, {}) is None
    assert plan(8, 3, parents, {2: 2.5}) == [Step(2, True, 2), Step(3, False, 3)]


def test_what_lies_between_kept_versions_stays() -> None:
    parents = {version: version - 1 for version in range(1, 10)}
    assert removable(range(10), parents, {4, 9}) == {0, 1, 2, 3}
    assert removable(range(10), parents, {4, 6}) == {0, 1, 2, 3, 7, 8, 9}
    assert removable(range(10), parents, set()) == set(range(10))


@given(st.data())
def test_removal_keeps_every_walk_between_kept_versions(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 25))
    parents = {
        v: data.draw(st.integers(0, v - 1)) for v in range(1, size) if data.draw(st.integers(0, 9)) > 0
    }
    kept = data.draw(st.sets(st.integers(0, size - 1)))
    gone = removable(range(size), parents, kept)
    assert not gone & kept
    records = {child: (parent, 1.0) for child, parent in parents.items()}
    left = {child: edge for child, edge in records.items() if child not in gone and edge[0] not in gone}
    for origin in kept:
        for target in kept:
            assert plan(origin, target, records, {}) == plan(origin, target, left, {})
    for version in set(range(size)) - gone - kept:
        ends = [other for other in kept if plan(version, other, left, {}) is not None]
        assert len(ends) >= 2, f"{version} leads nowhere and should have been removed"
