"""Answers of an engine are taken whole or refused with the field and the values."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from sglang_bridge import EngineError, Generation, SamplingOptions, Span
from sglang_bridge.protocol import Answer, flag_old_keys, parse_scores, parse_spans, parse_version
from tests.unit.bridge_endpoint import LENGTH, event, span


def answer(*events: Any, prompt: int = 3, limit: int = 200, shape: tuple[int, int] | None = None) -> Generation:
    """What a client makes of these events."""
    collected = Answer(prompt, limit, shape)
    for item in events:
        collected.add(item)
    return collected.finish()


def test_tokens_are_labelled_by_the_spans_not_by_the_last_label() -> None:
    ids = list(range(100, 228))
    spans = [span(7, 0, 57), span(8, 57, 90), span(9, 90, 128)]
    events = [event(ids[i:i + 1], i + 1, version="9") for i in range(127)]  # the label races ahead
    generation = answer(*events, event(ids[127:], 128, finish=LENGTH, spans=spans, version="9"))
    version_of = [s.version for s in generation.spans for _ in range(s.start, s.end)]
    assert (version_of[56], version_of[57], version_of[89], version_of[90]) == (7, 8, 8, 9)
    assert generation.output_ids == ids
    assert generation.logprobs == [-token / 100 for token in ids]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([span(7, 0, 2), span(8, 3, 4)], "do not tile"),
        ([span(7, 0, 3), span(8, 2, 4)], "do not tile"),
        ([span(7, 1, 4)], "do not tile"),
        ([span(7, 0, 3)], "end at 3, the output has 4"),
        ([span(7, 0, 5)], "do not tile"),
        ([span(7, 0, 0), span(8, 0, 4)], "do not tile"),
        ([], "no weight_versions"),
        (None, "no weight_versions"),
        ("7", "no weight_versions"),
        ([["7", 0, 4]], "not an object"),
        ([{"version": "7", "start": 0}], "field 'end' is None"),
        ([{"version": "default", "start": 0, "end": 4}], "'default' is not a version number"),
        ([{"version": 7, "start": 0, "end": 4}], "7 is not a version number"),
        ([{"version": "7", "start": False, "end": 4}], "field 'start' is False"),
    ],
)
def test_spans_that_do_not_tile_the_output_are_refused(spans: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_spans(spans, 4)


def test_neighbouring_spans_of_one_version_are_one() -> None:
    assert parse_spans([span(7, 0, 2), span(7, 2, 4), span(9, 4, 5)], 5) == [Span(7, 0, 4), Span(9, 4, 5)]


@pytest.mark.parametrize(
    "label", ["", "default", "-1", "1.5", "²", " 3", None, 3, str(2**31), "20261130120000", "9" * 5000]
)
def test_a_label_that_is_no_version_is_refused(label: object) -> None:
    with pytest.raises(EngineError, match="is not a version number"):
        parse_version(label)


def test_cumulative_and_incremental_streams_give_the_same() -> None:
    ids = [11, 12, 13, 14]
    incremental = [event(ids[:1], 1), event(ids[1:3], 3), event(ids[3:], 4, finish=LENGTH)]
    cumulative = [event(ids[:1], 1), event(ids[:3], 3), event(ids, 4, finish=LENGTH)]
    assert answer(*incremental) == answer(*cumulative)


def test_the_last_token_repeated_by_an_abort_is_taken_once() -> None:
    # SGLang ends an incremental stream this way when a retracted request is aborted in the queue.
    final = event([12], 2, finish={"type": "abort", "message": "m"}, output_token_logprobs=[[-0.11, 11, None],
                                                                                            [-0.12, 12, None]])
    del final["meta_info"]["prompt_tokens"]
    generation = answer(event([11], 1), event([12], 2), final)
    assert generation.output_ids == [11, 12]
    assert generation.finish_reason == "abort"


def test_an_abort_without_tokens_or_routed_experts_is_an_empty_answer() -> None:
    generation = answer(event([], 0, finish={"type": "abort"}, spans=[span(7, 0, 0)]), shape=(3, 2))
    assert (generation.output_ids, generation.logprobs, generation.spans) == ([], [], [])
    assert generation.routed_experts is None


def test_an_error_in_the_finish_reason_is_raised() -> None:
    reason = {"type": "abort", "status_code": 503, "message": "out of memory"}
    with pytest.raises(EngineError, match="HTTP 503: out of memory"):
        answer(event([], 0, finish=reason))


def with_meta(**meta: Any) -> dict[str, Any]:
    """A final event of tokens 11, 12 with some fields replaced."""
    return event([11, 12], 2, finish=LENGTH, **meta)


def without(*path: str) -> dict[str, Any]:
    """A final event that lacks one field."""
    final = with_meta()
    inner = final
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return final


MALFORMED = [
    (with_meta(output_token_logprobs=[[-0.1, 11, None]]), "1 log-probs for 2 tokens"),
    (with_meta(output_token_logprobs=[[-0.1, 11, None], [None, 12, None]]), "log-prob of token 1 .* is None"),
    (with_meta(output_token_logprobs=[[-0.1, 11, None], [float("nan"), 12, None]]), "is nan"),
    (with_meta(output_token_logprobs=[[-0.1, 11, None], [float("-inf"), 12, None]]), "is -inf"),
    (with_meta(output_token_logprobs=[[-0.1, 11, None], [0.5, 12, None]]), "is 0.5"),
    (with_meta(output_token_logprobs=[[-0.1, 11, None], [-1e39, 12, None]]), "is -1e"),
    (with_meta(output_token_logprobs=[[-0.1, 11, None], [-0.1, 13, None]]), "speaks of token 13"),
    (with_meta(output_token_logprobs=[[-0.1, 11, None], -0.1]), "log-prob entry 1 is -0.1"),
    (with_meta(completion_tokens=5), "counts 5 output tokens, 0 were received before and this event carries 2"),
    (with_meta(prompt_tokens=4), "saw 4 prompt tokens, 3 were sent"),
    (with_meta(finish_reason={"type": "boredom"}), "unknown finish reason 'boredom'"),
    (with_meta(finish_reason="length"), "'finish_reason' is 'length', expected Mapping"),
    (event([11, 12.5], 2, finish=LENGTH), "are not token ids"),  # type: ignore[list-item]
    (event([11, -2], 2, finish=LENGTH), "are not token ids"),
    (event([], 0, finish=LENGTH), "'length' with no output token"),
    (event(list(range(250)), 250, finish=LENGTH), "250 output tokens, at most 200"),
    (without("meta_info"), "field 'meta_info' is None"),
    (without("output_ids"), "field 'output_ids' is None"),
    (without("meta_info", "completion_tokens"), "field 'completion_tokens' is None"),
    (without("meta_info", "output_token_logprobs"), "field 'output_token_logprobs' is None"),
    (without("meta_info", "weight_versions"), "no weight_versions"),
    (without("meta_info", "prompt_tokens"), "saw None prompt tokens"),
    (without("meta_info", "finish_reason"), "without a finish reason"),
    ({"error": {"message": "bad request", "code": 400}}, "HTTP 400: bad request"),
    ({"error": "no"}, "no"),
    ([], "event is list"),
]


def test_a_log_prob_that_rounding_put_above_zero_is_zero() -> None:
    """A trajectory takes none above 0; a streamed one is recorded by a background task, which has nobody to blame."""
    rounded = event([11, 12], 2, finish=LENGTH, output_token_logprobs=[[5e-4, 11, None], [-0.25, 12, None]])
    assert answer(rounded).logprobs == [0.0, -0.25]
    collecting = Answer(prompt_tokens=3, max_new_tokens=4)
    chunk = collecting.add(rounded)
    assert chunk is not None and chunk.logprobs == [0.0, -0.25]


@pytest.mark.parametrize(("malformed", "message"), MALFORMED, ids=[message for _, message in MALFORMED])
def test_malformed_answers_are_refused(malformed: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        answer(malformed)


def test_a_stream_that_lost_an_event_is_refused() -> None:
    with pytest.raises(EngineError, match="counts 3 output tokens, 1 were received"):
        answer(event([11], 1), event([13], 3, finish=LENGTH))


def test_a_stream_that_goes_on_after_its_end_is_refused() -> None:
    with pytest.raises(EngineError, match="went on after its finish reason"):
        answer(event([11], 1, finish=LENGTH), event([12], 2))


def test_routed_experts_have_one_row_less_than_tokens() -> None:
    experts = np.arange(4 * 3 * 2, dtype=np.int32)  # prompt 3 + output 2 - 1 rows
    coded = base64.b64encode(experts.tobytes()).decode()
    generation = answer(with_meta(routed_experts=coded), shape=(3, 2))
    assert generation.routed_experts is not None
    assert np.array_equal(generation.routed_experts, experts.reshape(4, 3, 2))
    short = base64.b64encode(experts[:-6].tobytes()).decode()
    refused = [(short, "18 entries, expected 4 rows"), (coded[:-8], "not base64 of int32"), ("%%%", "not base64"),
               (None, "are missing")]
    for wrong, message in refused:
        with pytest.raises(EngineError, match=message):
            answer(with_meta(routed_experts=wrong), shape=(3, 2))


def test_old_keys_are_flagged_unless_retraction_recomputed_them() -> None:
    spans = [Span(7, 0, 5), Span(8, 5, 9), Span(9, 9, 12)]
    flags = {
        (2, False, None): [None, None, None],
        (1, False, None): [None, 7, 7],  # one of the two updates went over the old keys
        (0, False, None): [None, 7, 7],
        (2, True, None): [None, 7, 7],  # retractions of an in-place engine are for memory
        (0, True, 4): [4, 4, 4],
        (2, False, 4): [4, None, None],
    }
    for (retractions, in_place, cached), expected in flags.items():
        flagged = flag_old_keys(spans, retractions=retractions, in_place=in_place, oldest_cached=cached)
        assert [s.kv_version for s in flagged] == expected
        assert [(s.version, s.start, s.end) for s in flagged] == [(s.version, s.start, s.end) for s in spans]
    assert flag_old_keys([], retractions=0, in_place=True, oldest_cached=1) == []


def test_scores_are_token_aligned() -> None:
    def scored(entries: list[Any]) -> dict[str, Any]:
        return {"meta_info": {"input_token_logprobs": entries}}

    whole = [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]]
    assert parse_scores(scored(whole), [5, 6, 7], 0) == [0.0, -1.0, -2.0]
    assert parse_scores(scored([[None, 6, None], [-2.0, 7, None]]), [5, 6, 7], 1) == [0.0, 0.0, -2.0]
    with pytest.raises(EngineError, match="2 prompt log-probs from position 0 of 3"):
        parse_scores(scored(whole[1:]), [5, 6, 7], 0)
    with pytest.raises(EngineError, match="is None"):
        parse_scores(scored([*whole[:2], [None, 7, None]]), [5, 6, 7], 0)


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": 0}]
)
def test_impossible_sampling_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        SamplingOptions(**({"max_new_tokens": 4} | wrong))
