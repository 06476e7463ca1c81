"""The client against a scripted engine: deadlines, retries where safe, control calls, counters (bugs 2, 4, 29)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from aiohttp import web

from sglang_bridge import (
    Chunk,
    EngineClient,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
    Generation,
    SamplingOptions,
)
from tests.unit.bridge_endpoint import (
    LENGTH,
    ScriptedEndpoint,
    drop_after,
    drop_connection,
    event,
    span,
    stay_silent,
)

T = TypeVar("T")

OPTIONS = SamplingOptions(max_new_tokens=10)
GOOD = [event([11], 1), event([12, 13], 3), event([14], 4, finish=LENGTH)]


def against(
    endpoint: ScriptedEndpoint, call: Callable[[EngineClient], Coroutine[Any, Any, T]], **options: Any
) -> T:
    """Run ``call`` with a client of ``endpoint``."""

    async def run() -> T:
        async with endpoint, EngineClient(endpoint.url, **options) as client:
            return await call(client)

    return asyncio.run(run())


def stream(client: EngineClient, chunks: list[Chunk] | None = None) -> Coroutine[Any, Any, Generation]:
    """A streamed generation whose chunks are collected."""
    return client.generate([1, 2, 3], OPTIONS, on_chunk=(chunks if chunks is not None else []).append)


def test_chunks_and_answer_agree_and_the_request_is_token_in() -> None:
    endpoint, chunks = ScriptedEndpoint(GOOD), []
    generation = against(endpoint, lambda client: stream(client, chunks))
    assert generation.output_ids == [11, 12, 13, 14]
    assert [(chunk.start, chunk.output_ids) for chunk in chunks] == [(0, [11]), (1, [12, 13]), (3, [14])]
    sent = endpoint.requests[0]
    assert sent["input_ids"] == [1, 2, 3]
    assert "text" not in sent
    assert sent["return_logprob"] is True
    assert sent["sampling_params"]["max_new_tokens"] == 10


def test_chunks_around_an_update_keep_their_arrival_label_and_the_spans_decide() -> None:
    spans = [span(7, 0, 3), span(8, 3, 4)]
    events = [event([11], 1, version="7"), event([12, 13], 3, version="8"),  # sampled under 7, sent under 8
              event([14], 4, finish=LENGTH, spans=spans, version="8")]
    chunks: list[Chunk] = []
    generation = against(ScriptedEndpoint(events), lambda client: stream(client, chunks))
    assert [chunk.version_on_arrival for chunk in chunks] == ["7", "8", "8"]
    assert [(s.version, s.start, s.end) for s in generation.spans] == [(7, 0, 3), (8, 3, 4)]


def test_a_broken_connection_is_retried_only_before_the_first_token() -> None:
    generation = against(ScriptedEndpoint(drop_connection, GOOD), stream)
    assert len(generation.output_ids) == 4
    endpoint = ScriptedEndpoint(drop_after(GOOD[:2]), GOOD)
    with pytest.raises(EngineUnreachable, match="generation"):
        against(endpoint, stream)
    assert len(endpoint.requests) == 1


def test_retries_end() -> None:
    endpoint = ScriptedEndpoint(*[drop_connection] * 5)
    with pytest.raises(EngineUnreachable):
        against(endpoint, stream, retries=1)
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize("broken", [[b"data: {\"a\"\n\n"], [b"data: [1,\n\n", b"data: [DONE]\n\n"]])
def test_what_is_not_json_is_refused(broken: list[bytes]) -> None:
    with pytest.raises(EngineError, match="not JSON"):
        against(ScriptedEndpoint(broken), stream)


def test_truncated_streams_are_refused() -> None:
    for truncated, message in [
        ([*GOOD[:2], b""], "ended after 3 tokens without a finish reason"),
        ([b"data: {\"text\": "], "broke off in the middle of an event"),
        ([], "ended after 0 tokens"),
    ]:
        with pytest.raises(EngineError, match=message):
            against(ScriptedEndpoint(truncated), stream)


def test_records_may_arrive_in_any_pieces() -> None:
    import json

    whole = b": keep-alive\n\n" + b"".join(f"data: {json.dumps(item)}\n\n".encode() for item in GOOD)
    whole += b"data: [DONE]\n\n"
    for size in (1, 7, 64, 100_000):
        pieces = [whole[i:i + size] for i in range(0, len(whole), size)]
        assert against(ScriptedEndpoint(pieces), stream).output_ids == [11, 12, 13, 14]


def test_silence_has_a_deadline_that_names_the_engine() -> None:
    endpoint = ScriptedEndpoint(stay_silent)
    with pytest.raises(EngineTimeout, match=r"http://127.0.0.1:\d+: generation job-1: no answer for 0.2 s"):
        against(endpoint, lambda client: client.generate([1, 2, 3], OPTIONS, rid="job-1"), stall_s=0.2)


def test_a_slow_drip_is_no_silence() -> None:
    async def drip(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        import json

        response = web.StreamResponse()
        await response.prepare(request)
        for item in GOOD:
            await asyncio.sleep(0.5)
            await response.write(f"data: {json.dumps(item)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    assert len(against(ScriptedEndpoint(drip), stream, stall_s=1.4).output_ids) == 4


def test_an_http_error_carries_status_and_message() -> None:
    async def refuse(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "prompt too long"}}, status=400)

    with pytest.raises(EngineError, match="HTTP 400: prompt too long") as caught:
        against(ScriptedEndpoint(refuse), stream)
    assert caught.value.status == 400


def test_prompts_that_would_hurt_an_engine_are_not_sent() -> None:
    endpoint = ScriptedEndpoint()
    for prompt, message in [([], "empty"), ([3, -1], "token id -1"), ([3, 10], r"token id 10 .* \[0, 10\)")]:
        with pytest.raises(ValueError, match=message):
            against(endpoint, lambda client, prompt=prompt: client.generate(prompt, OPTIONS), vocab_size=10)
    with pytest.raises(ValueError, match="routed_experts_shape"):
        against(endpoint, lambda client: client.generate([1], OPTIONS, return_routed_experts=True))
    assert endpoint.requests == []


def test_setting_the_version_says_not_to_abort() -> None:
    endpoint = ScriptedEndpoint()

    async def control(client: EngineClient) -> int:
        await client.set_version(8)
        await client.pause("in_place")
        await client.resume()
        await client.abort("job-1")
        return await client.version()

    assert against(endpoint, control) == 7
    assert endpoint.controls[:4] == [
        ("/update_weight_version", {"new_version": "8", "abort_all_requests": False}),
        ("/pause_generation", {"mode": "in_place"}),
        ("/continue_generation", {}),
        ("/abort_request", {"rid": "job-1"}),
    ]


def test_aborted_tokens_are_counted() -> None:
    aborted = [event([11], 1), event([12], 2, finish={"type": "abort", "message": "m"})]

    async def two(client: EngineClient) -> Any:
        await stream(client)
        await stream(client)
        return client.counters

    counters = against(ScriptedEndpoint(aborted, GOOD), two)
    assert (counters.requests, counters.tokens, counters.aborted_requests, counters.aborted_tokens) == (2, 6, 1, 2)


def test_cancelling_a_request_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def watch(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)
        closed.set()
        return response

    async def cancel(client: EngineClient) -> bool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await stream(client)
        async with asyncio.timeout(20):
            await closed.wait()
        return True

    assert against(ScriptedEndpoint(watch), cancel)


def test_an_engine_that_is_not_there_is_unreachable_and_unhealthy() -> None:
    async def ask() -> bool:
        async with EngineClient("http://127.0.0.1:9", retries=0) as client:
            with pytest.raises(EngineUnreachable, match="http://127.0.0.1:9"):
                await client.version()
            return await client.health()

    assert asyncio.run(ask()) is False
