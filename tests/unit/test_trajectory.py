"""The trajectory type: what it refuses, what it records, and that chunking and storage leave no trace."""

from __future__ import annotations

import hashlib
import itertools
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.trajectory import (
    SamplingParams,
    Status,
    Trajectory,
    TrajectoryError,
    Turn,
    VersionSpan,
)


def new(**sampling: Any) -> Trajectory:
    return Trajectory("t0", "g0", "p0", SamplingParams(**sampling), {"seed": 3})


def action(
    trajectory: Trajectory, n: int, version: int, reason: str | None = "stop", first: int = 100
) -> None:
    spans = [VersionSpan(version, 0, n)] if n else []
    trajectory.append_action(range(first, first + n), [-0.5] * n, spans, reason)


def small() -> Trajectory:
    trajectory = new()
    trajectory.append_context([1, 2, 3])
    action(trajectory, 2, version=7)
    trajectory.append_context([4])
    action(trajectory, 1, version=8)
    return trajectory


# ---------------------------------------------------------------- what is recorded


def test_arrays_are_aligned_to_the_token_they_speak_of() -> None:
    t = small()
    assert t.token_ids.tolist() == [1, 2, 3, 100, 101, 4, 100]
    assert t.loss_mask.tolist() == [False, False, False, True, True, False, True]
    assert t.versions.tolist() == [-1, -1, -1, 7, 7, -1, 8]
    np.testing.assert_array_equal(t.rollout_logprobs, [np.nan, np.nan, np.nan, -0.5, -0.5, np.nan, -0.5])
    assert t.spans == (VersionSpan(7, 3, 5), VersionSpan(8, 6, 7))
    assert t.turns == (Turn(3, 5, "stop"), Turn(6, 7, "stop"))
    assert (t.min_version, t.max_version, t.num_action_tokens, len(t)) == (7, 8, 3, 7)
    dtypes = [str(array.dtype) for array in (t.token_ids, t.rollout_logprobs, t.versions, t.loss_mask)]
    assert dtypes == ["int32", "float32", "int32", "bool"]


def test_half_open_spans_put_the_border_token_into_the_newer_version() -> None:
    """SGLang's [0,57)->7, [57,90)->8, [90,128)->9: token 56 is 7, token 57 is 8 (not all 9)."""
    t = new()
    t.append_context([1])
    spans = [VersionSpan(7, 0, 57), VersionSpan(8, 57, 90), VersionSpan(9, 90, 128)]
    t.append_action(range(128), [-1.0] * 128, spans, "length")
    versions = t.versions[1:]
    assert (versions[56], versions[57], versions[89], versions[90], versions[127]) == (7, 8, 8, 9, 9)


def test_end_of_sequence_equal_to_padding_stays_in_the_loss() -> None:
    pad = eos = 0
    t = new()
    t.append_context([pad, 5])
    t.append_action([6, eos], [-0.1, -0.2], [VersionSpan(0, 0, 2)], "stop")
    assert t.loss_mask.tolist() == [False, False, True, True]


def test_adjacent_spans_of_one_version_merge_and_kv_versions_keep_them_apart() -> None:
    t = new()
    t.append_context([1])
    t.append_action([2, 3], [-1, -1], [VersionSpan(4, 0, 1), VersionSpan(4, 1, 2)])
    t.append_action([4], [-1], [VersionSpan(4, 0, 1, kv_version=4)])
    t.append_action([5], [-1], [VersionSpan(5, 0, 1, kv_version=4)], "stop")
    assert t.spans == (VersionSpan(4, 1, 4), VersionSpan(5, 4, 5, kv_version=4))
    assert t.kv_mismatch.tolist() == [False, False, False, False, True]


def test_arrays_are_read_only_and_json_is_copied() -> None:
    task = {"facts": [1]}
    t = Trajectory("t", "g", "p", SamplingParams(), task)
    t.append_context([1, 2])
    task["facts"].append(2)
    assert t.task == {"facts": [1]}
    with pytest.raises(ValueError, match="read-only"):
        t.token_ids[0] = 9


def test_an_aborted_response_without_tokens_is_a_turn_without_tokens() -> None:
    t = new()
    t.append_context([1])
    t.append_action([], [], [], finish_reason="abort")
    t.finish(Status.ABORTED)
    assert t.turns == (Turn(1, 1, "abort"),)
    assert (t.min_version, t.num_action_tokens, t.reward, t.routed_experts) == (None, 0, None, None)


# ---------------------------------------------------------------- what is refused

REFUSED: list[tuple[str, list[Any], list[Any], list[tuple[int, int, int]], str]] = [
    ("lengths differ", [1, 2], [-1.0], [(0, 0, 2)], "2 action ids but 1 log-probs"),
    ("spans too short", [1, 2], [-1, -1], [(0, 0, 1)], "cover 1 of the chunk's 2"),
    ("spans too long", [1, 2], [-1, -1], [(0, 0, 3)], "cover 3 of the chunk's 2"),
    ("spans overlap", [1, 2], [-1, -1], [(0, 0, 2), (0, 1, 2)], "must tile"),
    ("spans leave a hole", [1, 2, 3], [-1, -1, -1], [(0, 0, 1), (0, 2, 3)], "must tile"),
    ("spans out of order", [1, 2], [-1, -1], [(0, 1, 2), (0, 0, 1)], "must tile"),
    ("no spans", [1], [-1], [], "cover 0 of the chunk's 1"),
    ("spans without tokens", [], [], [(0, 0, 1)], "cover 1 of the chunk's 0"),
    ("positive log-prob", [1], [0.1], [(0, 0, 1)], r"\[0\]=0.1"),
    ("nan log-prob", [1, 2], [-1, float("nan")], [(0, 0, 2)], r"\[1\]=nan"),
    ("infinite log-prob", [1], [float("-inf")], [(0, 0, 1)], r"\[0\]=-inf"),
    ("log-prob beyond float32", [1], [-1e300], [(0, 0, 1)], r"\[0\]=-inf"),
    ("missing log-prob", [1, 2], [None, -1.0], [(0, 0, 2)], r"\[0\]=nan"),
    ("negative id", [-1], [-1], [(0, 0, 1)], r"-1\.\.-1"),
    ("id beyond int32", [2**31], [-1], [(0, 0, 1)], "2147483648"),
    ("float id", [1.5], [-1], [(0, 0, 1)], "float64"),
    ("nested ids", [[1]], [-1], [(0, 0, 1)], r"\[1, 1\]"),
    ("text ids", ["a"], [-1], [(0, 0, 1)], "flat list of integers"),
    ("boolean ids", [True], [-1], [(0, 0, 1)], "bool"),
]


@pytest.mark.parametrize(
    ("what", "ids", "logprobs", "spans", "message"), REFUSED, ids=[r[0] for r in REFUSED]
)
def test_a_bad_chunk_is_refused_and_changes_nothing(
    what: str, ids: list[Any], logprobs: list[Any], spans: list[tuple[int, int, int]], message: str
) -> None:
    t = small()
    t.append_context([9])
    before = t.to_bytes()
    shifted = [VersionSpan(version + 8, start, end) for version, start, end in spans]
    with pytest.raises(TrajectoryError, match=message):
        t.append_action(ids, logprobs, shifted)
    assert t.to_bytes() == before, what


def test_tokens_of_a_resumed_version_may_follow_those_of_a_lost_one() -> None:
    """The trainer published 11, was killed before it had committed the step, and resumed at 10."""
    t = small()
    t.append_context([9])
    t.append_action([5, 6], [-1.0, -1.0], [VersionSpan(11, 0, 1), VersionSpan(10, 1, 2)])
    t.append_action([7], [-1.0], [VersionSpan(12, 0, 1)], "stop")
    assert [span.version for span in t.spans][-3:] == [11, 10, 12]
    assert (t.min_version, t.max_version, t.last_version) == (7, 12, 12)
    assert Trajectory.from_bytes(t.to_bytes()) == t


@pytest.mark.parametrize("span", [(-1, 0, 1), (0, 1, 1), (0, 2, 1), (0, -1, 1)])
def test_an_impossible_span_cannot_be_written_down(span: tuple[int, int, int]) -> None:
    with pytest.raises(TrajectoryError):
        VersionSpan(*span)


def test_kv_from_a_newer_version_is_impossible() -> None:
    with pytest.raises(TrajectoryError, match="newer"):
        VersionSpan(3, 0, 1, kv_version=4)


def test_rounding_above_zero_is_tolerated_and_stored_as_zero() -> None:
    t = new()
    t.append_context([1])
    t.append_action([2], [3e-7], [VersionSpan(0, 0, 1)])  # 3e-7: a few float32 ulps of 1.0
    assert t.rollout_logprobs[1] == 0.0


def test_order_of_context_and_action_is_checked() -> None:
    t = new()
    with pytest.raises(TrajectoryError, match="before any context"):
        action(t, 1, 0)
    t.append_context([1])
    action(t, 1, 0, reason=None)
    with pytest.raises(TrajectoryError, match=r"inside the open turn \[1, 2\)"):
        t.append_context([2])


def test_nothing_can_be_appended_after_finish() -> None:
    t = small()
    t.finish(Status.OK, reward=0.5)
    for operation in (
        lambda: t.append_context([1]),
        lambda: action(t, 1, 9),
        lambda: t.finish(Status.OK, 1.0),
        lambda: t.withdraw(0),
    ):
        with pytest.raises(TrajectoryError, match="after it was finished as ok"):
            operation()


@pytest.mark.parametrize(
    ("status", "reward", "message"),
    [
        (Status.OK, None, "needs a reward"),
        (Status.OK, float("nan"), "finite"),
        (Status.ENVIRONMENT_ERROR, 0.0, "a failure, not a reward of 0.0"),
        (Status.ENGINE_ERROR, 0.0, "a failure"),
        (Status.ABORTED, 1.0, "a failure"),
        (Status.RUNNING, None, "end status"),
    ],
)
def test_failures_are_not_rewards(status: Status, reward: float | None, message: str) -> None:
    t = small()
    with pytest.raises(TrajectoryError, match=message):
        t.finish(status, reward)
    assert not t.finished


def test_ok_needs_a_closed_turn_and_failures_close_it() -> None:
    t = new()
    t.append_context([1])
    action(t, 2, 0, reason=None)
    with pytest.raises(TrajectoryError, match="open since 1"):
        t.finish(Status.OK, 1.0)
    t.finish(Status.ENGINE_ERROR)
    assert t.turns == (Turn(1, 3, "abort"),)
    assert not t.status.trainable


def test_json_that_cannot_be_stored_is_refused() -> None:
    with pytest.raises(TrajectoryError, match="JSON"):
        Trajectory("t", "g", "p", SamplingParams(), {"bad": float("nan")})
    with pytest.raises(TrajectoryError, match="trajectory_id"):
        Trajectory("", "g", "p", SamplingParams())


# ---------------------------------------------------------------- partial responses


def test_a_continued_turn_gets_the_rest_of_its_budget() -> None:
    t = new(max_new_tokens=10)
    t.append_context([1, 2])
    assert t.remaining_new_tokens() == 10
    action(t, 4, 0, reason=None)
    assert t.remaining_new_tokens() == 6
    assert t.remaining_new_tokens(max_tokens=8) == 2
    with pytest.raises(TrajectoryError, match=r"4 \+ 7 tokens exceed the turn's budget of 10"):
        action(t, 7, 0, reason=None)
    resumed = Trajectory.from_bytes(t.to_bytes())
    assert resumed.remaining_new_tokens() == 6
    action(resumed, 6, 1, reason="length")
    assert resumed.remaining_new_tokens() == 10  # a new turn
    assert resumed.remaining_new_tokens(max_tokens=5) == 0


def test_withdrawing_the_whole_open_turn_returns_to_the_last_complete_one() -> None:
    t, expected = small(), small()
    action(t, 3, 8, reason=None)  # directly after a turn of version 8: the span is merged, and cut again
    t.withdraw(3)
    assert t == expected
    assert t.open_turn is None


# ---------------------------------------------------------------- routed experts


def routing(length: int, experts: int = 8) -> np.ndarray[Any, Any]:
    rows = np.arange((length - 1) * 2 * 3).reshape(length - 1, 2, 3)
    return rows % experts


def test_routed_experts_of_a_continued_response_are_neither_doubled_nor_shifted() -> None:
    whole, parts = new(), new()
    for t in (whole, parts):
        t.append_context([1, 2, 3])
    whole.append_action([4, 5, 6], [-1] * 3, [VersionSpan(0, 0, 3)], "stop", routing(6))
    parts.append_action([4], [-1], [VersionSpan(0, 0, 1)], None, routing(4))
    parts.append_action([], [], [], None)  # aborted without tokens and without routing
    parts.append_action([5, 6], [-1] * 2, [VersionSpan(0, 0, 2)], "stop", routing(6))
    assert parts == whole
    assert whole.routed_experts is not None
    np.testing.assert_array_equal(whole.routed_experts, routing(6))
    assert whole.routed_experts.dtype == np.uint8


def test_rows_recorded_first_win_over_a_later_recomputation() -> None:
    t = new()
    t.append_context([1, 2])
    t.append_action([3], [-1], [VersionSpan(0, 0, 1)], None, np.full((2, 1, 1), 5))
    t.append_action([4], [-1], [VersionSpan(1, 0, 1)], "stop", np.full((3, 1, 1), 9))
    assert t.routed_experts is not None
    assert t.routed_experts[:, 0, 0].tolist() == [5, 5, 9]


def test_routing_of_a_withdrawn_turn_is_forgotten() -> None:
    t = new()
    t.append_context([1, 2])
    t.append_action([3, 4], [-1, -1], [VersionSpan(0, 0, 2)], None, np.full((3, 1, 1), 5))
    t.withdraw(2)
    t.append_action([6], [-1], [VersionSpan(1, 0, 1)], "stop", np.full((2, 1, 1), 9))
    assert t.routed_experts is not None
    assert t.routed_experts[:, 0, 0].tolist() == [5, 9]  # row 0 is of a token that stayed


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.int16)])
def test_routed_experts_are_compact(experts: int, dtype: type) -> None:
    t = new()
    t.append_context([1, 2])
    t.append_action([3], [-1], [VersionSpan(0, 0, 1)], "stop", np.full((2, 1, 1), experts - 1))
    assert t.routed_experts is not None
    assert t.routed_experts.dtype == dtype
    assert int(t.routed_experts[0, 0, 0]) == experts - 1
    assert Trajectory.from_bytes(t.to_bytes()) == t


def test_routing_that_misses_an_action_token_is_absent_not_guessed() -> None:
    t = new()
    t.append_context([1, 2])
    t.append_action([3], [-1], [VersionSpan(0, 0, 1)], "stop", routing(3))
    t.append_context([7, 7])
    assert t.routed_experts is not None
    assert t.routed_experts.shape == (4, 2, 3)  # L - 1; the trailing observation repeats the last row
    action(t, 1, 0)
    assert t.routed_experts is None


@pytest.mark.parametrize("bad", [routing(5), routing(3), routing(4)[0], routing(4) * 0.5, routing(4) - 1])
def test_routed_experts_of_the_wrong_shape_or_kind_are_refused(bad: np.ndarray[Any, Any]) -> None:
    t = new()
    t.append_context([1, 2, 3])
    with pytest.raises(TrajectoryError, match="rou|expert"):
        t.append_action([4], [-1], [VersionSpan(0, 0, 1)], None, bad)
    assert len(t) == 3


# ---------------------------------------------------------------- properties

turns_strategy = st.lists(
    st.tuples(
        st.lists(st.integers(0, 150_000), min_size=1, max_size=5),  # context
        st.lists(
            st.tuples(st.integers(0, 150_000), st.floats(-50, 0, width=32), st.integers(0, 1)), max_size=12
        ),  # action: id, log-prob, version step
    ),
    min_size=1,
    max_size=4,
)


def chunked(draw: st.DataObject | None, turns: list[Any], experts: bool = False) -> Trajectory:
    """Build a trajectory, each turn in one chunk (draw None) or cut at drawn places.

    The finish reason comes with the last chunk, or (drawn) in an empty one of its own, as engines do both.
    """
    t, version = new(), 3
    for context, tokens in turns:
        t.append_context(context)
        rows = []
        for token, logprob, step in tokens:
            version += step
            rows.append((token, logprob, version))
        cuts = [] if draw is None else sorted(draw.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
        bounds = [0, *cuts, len(rows)]
        chunks = [rows[start:end] for start, end in itertools.pairwise(bounds)]
        if draw is not None and draw.draw(st.booleans()):
            chunks.append([])
        for number, chunk in enumerate(chunks, 1):
            t.append_action(
                [r[0] for r in chunk],
                [r[1] for r in chunk],
                [VersionSpan(r[2], i, i + 1) for i, r in enumerate(chunk)],
                "stop" if number == len(chunks) else None,
                routing(len(t) + len(chunk), 300) if experts else None,
            )
    return t


@given(turns_strategy, st.data(), st.booleans())
def test_any_chunking_gives_the_identical_trajectory(
    turns: list[Any], data: st.DataObject, experts: bool
) -> None:
    assert chunked(data, turns, experts) == chunked(None, turns, experts)


@given(turns_strategy, st.data())
def test_spans_tile_the_action_tokens_exactly(turns: list[Any], data: st.DataObject) -> None:
    t = chunked(data, turns)
    covered = np.zeros(len(t), int)
    for span in t.spans:
        covered[span.start : span.end] += 1
        assert (t.versions[span.start : span.end] == span.version).all()
    np.testing.assert_array_equal(covered, t.loss_mask.astype(int))
    assert t.loss_mask.sum() == sum(len(tokens) for _, tokens in turns) == t.num_action_tokens
    assert [s.version for s in t.spans] == sorted(s.version for s in t.spans)
    assert len(t.token_ids) == len(t.loss_mask) == len(t.rollout_logprobs) == len(t.versions) == len(t)


@given(turns_strategy, st.data(), st.booleans(), st.sampled_from(list(Status)))
def test_bytes_round_trip(turns: list[Any], data: st.DataObject, experts: bool, status: Status) -> None:
    t = chunked(data, turns, experts)
    if status is Status.OK and not t.num_action_tokens:
        status = Status.TRUNCATED
    if status is not Status.RUNNING:
        t.finish(status, 0.25 if status.trainable else None, {"why": "ümlaut"})
    back = Trajectory.from_bytes(t.to_bytes())
    assert back == t
    assert (back.status, back.reward, back.info, back.task, back.sampling) == (
        t.status, t.reward, t.info, t.task, t.sampling
    )  # fmt: skip
    np.testing.assert_array_equal(back.token_ids, t.token_ids)
    np.testing.assert_array_equal(back.rollout_logprobs, t.rollout_logprobs)
    np.testing.assert_array_equal(back.versions, t.versions)
    assert (back.spans, back.turns, back.open_turn, back.finished) == (
        t.spans,
        t.turns,
        t.open_turn,
        t.finished,
    )


@given(st.data())
def test_a_damaged_byte_anywhere_is_refused(data: st.DataObject) -> None:
    t = small()
    t.finish(Status.OK, 1.0)
    raw = bytearray(t.to_bytes())
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TrajectoryError):
        Trajectory.from_bytes(bytes(raw))


def test_truncated_foreign_and_future_data_are_refused() -> None:
    raw = small().to_bytes()
    for damaged in (b"", raw[:10], raw[:-1], raw + b"\0", b"\x80\x04pickle" + raw):
        with pytest.raises(TrajectoryError):
            Trajectory.from_bytes(damaged)
    future = raw[:4] + struct.pack("<H", 99) + raw[6:]
    with pytest.raises(TrajectoryError, match="format 99"):
        Trajectory.from_bytes(future)


def test_a_valid_digest_over_broken_contents_is_refused() -> None:
    """The digest proves transport, not sense: contents are checked by replaying the appends."""
    import zstandard

    t = small()
    body = zstandard.ZstdDecompressor().decompress(t.to_bytes()[22:])
    broken = body.replace(struct.pack("<f", -0.5), struct.pack("<f", 0.5), 1)
    assert broken != body
    packed = zstandard.ZstdCompressor().compress(broken)
    digest = hashlib.blake2b(b"MATJ" + struct.pack("<H", 1) + packed, digest_size=16).digest()
    with pytest.raises(TrajectoryError, match="not finite and <= 0"):
        Trajectory.from_bytes(b"MATJ" + struct.pack("<H", 1) + digest + packed)


def test_storage_is_compact() -> None:
    """8 bytes an action token and 4 a context token before compression; the rest is a small constant."""
    t = new(max_new_tokens=4096)
    rng = np.random.default_rng(0)
    t.append_context(rng.integers(0, 150_000, 1000))
    t.append_action(
        rng.integers(0, 150_000, 4000), -rng.exponential(1.0, 4000), [VersionSpan(0, 0, 4000)], "stop"
    )
    assert len(t.to_bytes()) < 4 * 5000 + 4 * 4000 + 400


def test_text_that_no_utf8_holds_is_written_as_question_marks() -> None:
    """JSON can spell half an emoji, and a policy or a data set does: the record of one must not be refused."""
    trajectory = Trajectory("t", "g", "p", SamplingParams(), {"words": "\ud83d", "face": "\U0001f600"})
    trajectory.append_context([1])
    trajectory.append_action([2], [-0.5], [VersionSpan(0, 0, 1)], "stop")
    trajectory.finish(Status.OK, 1.0, {"failure": "a\udc00b", "\ud83d": None})
    again = Trajectory.from_bytes(trajectory.to_bytes())
    assert again.task == {"words": "?", "face": "\U0001f600"} and again.info == {"failure": "a?b", "?": None}


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**30])
def test_integers_that_cannot_be_written_are_refused_when_they_come(value: int) -> None:
    Trajectory("t", "g", "p", SamplingParams(), {"n": 2**64 - 1}).to_bytes()
    with pytest.raises(TrajectoryError, match="64 bits"):
        Trajectory("t", "g", "p", SamplingParams(), {"n": value})


def test_json_without_an_end_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TrajectoryError, match="JSON"):
        Trajectory("t", "g", "p", SamplingParams(), {"deep": deep})
