"""Malformed engine answers: whatever was done to one, it is the true answer or a typed error, and nothing hangs.

Damage is what a network, a proxy or a broken engine does to an answer: anything but one valid value for another.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge import (
    EngineClient,
    EngineError,
    EnginePool,
    EngineTimeout,
    EngineUnreachable,
    Generation,
    SamplingOptions,
    Span,
)
from sglang_bridge.protocol import Answer
from tests.unit.bridge_endpoint import (
    LENGTH,
    ScriptedEndpoint,
    drop_after,
    drop_connection,
    event,
    raw_endpoint,
    span,
    stay_silent,
)

OPTIONS = SamplingOptions(max_new_tokens=4)
SPANS = [span(7, 0, 1), span(8, 1, 4)]
INCREMENTAL = [event([11], 1), event([12, 13], 3), event([14], 4, finish=LENGTH, spans=SPANS, num_retractions=1)]
CUMULATIVE = [event([11], 1), event([11, 12, 13], 3),
              event([11, 12, 13, 14], 4, finish=LENGTH, spans=SPANS, num_retractions=1)]
TRUTH = Generation([11, 12, 13, 14], [-0.11, -0.12, -0.13, -0.14], [Span(7, 0, 1), Span(8, 1, 4)], "length")
JUNK = [None, True, 10**12, 0.5, math.nan, math.inf, -math.inf, "", "x", [], {}, [None], {"a": 1}]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, containers included."""
    found = [path] if path else []
    if isinstance(value, dict):
        children: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    else:
        return found
    for key, child in children:
        found += places(child, (*path, key))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@st.composite
def damaged(draw: st.DrawFn) -> list[Any]:
    """The events of an answer after one to three accidents."""
    events: list[Any] = copy.deepcopy(draw(st.sampled_from([INCREMENTAL, CUMULATIVE])))
    for _ in range(draw(st.integers(1, 3))):
        everywhere = places(events)
        if not everywhere:
            break
        path = draw(st.sampled_from(everywhere))
        parent, key = at(events, path[:-1]), path[-1]
        kind = draw(st.sampled_from(["junk", "gone", "shifted", "twice"]))
        if kind == "gone":
            del parent[key]
        elif kind == "twice" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif kind == "shifted" and isinstance(parent, dict) and type(parent[key]) is int:
            parent[key] += draw(st.sampled_from([-1, 1]))
        else:
            parent[key] = copy.deepcopy(draw(st.sampled_from(JUNK)))
    return events


def assert_true_answer(generation: Generation) -> None:
    """Up to what is only a count (retractions), of which one valid value is as good as another."""
    assert generation.output_ids == TRUTH.output_ids
    assert generation.logprobs == TRUTH.logprobs
    assert generation.finish_reason == TRUTH.finish_reason
    assert [(s.version, s.start, s.end) for s in generation.spans] == [(s.version, s.start, s.end) for s in TRUTH.spans]


@settings(max_examples=250)
@given(damaged())
def test_a_damaged_answer_is_refused_or_is_the_answer(events: list[Any]) -> None:
    answer = Answer(prompt_tokens=3, max_new_tokens=4, known_version="7", vocab_size=1000)
    try:
        for item in events:
            answer.add(item)
        generation = answer.finish()
    except EngineError:
        return
    assert_true_answer(generation)


def sse(events: list[Any]) -> bytes:
    return b"".join(f"data: {json.dumps(item)}\n\n".encode() for item in events)


@pytest.mark.parametrize(
    "broken",
    [
        [event([11, 12], 2, finish=LENGTH, spans=[span(7, 0, 1)])],  # spans end early
        [event([11, 12], 2, finish=LENGTH, spans=[span(7, 0, 1), span(8, 1, 3)])],  # and late
        [event([11, 12], 2, finish=LENGTH, spans=[span(7, 1, 2), span(8, 0, 1)])],  # out of order
        [event([11, 12], 2, finish=LENGTH, spans=[span("latest", 0, 2)])],
        [event([11, 12], 2, finish=LENGTH, spans=[])],
        [event([11, 12], 2, finish=LENGTH, output_token_logprobs=[[-0.1, 11, None]])],  # one log-prob short
        [event([11], 1, finish=LENGTH, output_token_logprobs=[[math.nan, 11, None]])],
        [event([11], 1, finish=LENGTH, output_token_logprobs=[[None, 11, None]])],
        [event([11], 1, finish=LENGTH, output_token_logprobs=[[-0.1, 12, None]])],  # of another token
        [event([11], 2), event([12], 2, finish=LENGTH)],  # tokens are missing
        [event([11, 12, 13, 14, 15], 5, finish=LENGTH)],  # more than were asked for
        [event([999_999], 1, finish=LENGTH, output_token_logprobs=[[-0.1, 999_999, None]])],
        [event([11], 1, finish=LENGTH, prompt=4)],  # another prompt's answer
        [event([11], 1, finish={"type": "bored"})],
        [event([11], 1, finish=LENGTH, num_retractions="many")],
        [event([11], 1, finish=LENGTH, num_retractions=2**63)],
        [{"error": {"message": "scheduler died", "code": 500}}],
        [b"data: 12\n\n"], [b"data: null\n\n"], [b"\xff\xfe\n\n"], [b"<html>502 Bad Gateway</html>\n\n"], [b""],
        [*INCREMENTAL[:2], b""],
        [sse(INCREMENTAL)[:-30]],
    ],
    ids=range(24),
)  # fmt: skip
def test_what_contradicts_itself_is_a_typed_error(broken: list[Any]) -> None:
    async def run() -> None:
        async with ScriptedEndpoint(broken, broken) as engine, \
                EnginePool([engine.url], attempts=1, vocab_size=1000, deadline_s=30) as pool:
            with pytest.raises(EngineError):
                await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: None)

    asyncio.run(run())


async def status_500(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=500, text="<html>Internal Server Error</html>")


async def status_503(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"object": "error", "message": "no worker"}, status=503)


async def trickle(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    """A byte now and then, for ever."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


async def short_body(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    """Promises more bytes than it sends."""
    response = web.StreamResponse(headers={"Content-Length": "5000"})
    await response.prepare(request)
    await response.write(sse(INCREMENTAL[:1])[:20])
    assert request.transport is not None
    request.transport.close()
    return response


Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@pytest.mark.parametrize("first", [status_500, status_503, drop_connection, short_body, [], [b"data: {\"a\"\n\n"]])
def test_what_fails_before_a_token_came_is_answered_by_another_engine(first: Any) -> None:
    async def run() -> None:
        async with ScriptedEndpoint(*[first] * 4) as bad, ScriptedEndpoint(INCREMENTAL) as good, \
                EnginePool([bad.url, good.url], retries=0, deadline_s=60) as pool:
            assert_true_answer(await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: None))
            assert pool.in_flight == {bad.url: 0, good.url: 0}

    asyncio.run(run())


@pytest.mark.parametrize("handler", [trickle, stay_silent])
def test_a_drip_without_an_end_is_ended_by_the_deadline(handler: Handler) -> None:
    async def run() -> None:
        async with ScriptedEndpoint(handler) as engine, EnginePool([engine.url], deadline_s=0.4) as pool:
            with pytest.raises(EngineTimeout, match=r"not complete after 0.4 s: 0 tokens so far, tried on http"):
                await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: None)

    asyncio.run(run())


def test_an_answer_whose_connection_breaks_behind_its_end_is_whole() -> None:
    async def run() -> None:
        async with ScriptedEndpoint(drop_after(INCREMENTAL)) as engine, EnginePool([engine.url]) as pool:
            assert_true_answer(await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: None))

    asyncio.run(run())


def test_streamed_tokens_have_a_version_only_where_it_is_certain() -> None:
    """Known before the request, and still on the label when they came; never again after another label."""
    events = [event([11], 1, version="7"), event([12], 2, version="8"), event([13], 3, version="7"),
              event([14], 4, version="8", finish=LENGTH, spans=SPANS)]

    async def chunks(known: bool) -> list[int | None]:
        async with ScriptedEndpoint(events) as engine, EnginePool([engine.url]) as pool:
            if known:
                assert await pool.versions(30) == {engine.url: 7}
            seen: list[int | None] = []
            await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: seen.append(chunk.version))
            return seen

    assert asyncio.run(chunks(known=False)) == [None] * 4
    assert asyncio.run(chunks(known=True)) == [7, None, None, None]


def test_an_engine_that_broke_may_be_another_process_when_it_is_back() -> None:
    async def run() -> list[int | None]:
        async with ScriptedEndpoint(drop_connection, INCREMENTAL) as engine, EnginePool([engine.url]) as pool:
            await pool.versions(30)
            seen: list[int | None] = []
            await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: seen.append(chunk.version))
            return seen

    assert asyncio.run(run()) == [None, None, None]


def test_nobody_listening_is_unreachable() -> None:
    async def run() -> None:
        async with EnginePool(["http://127.0.0.1:9"], retries=0, deadline_s=30) as pool:
            with pytest.raises(EngineUnreachable):
                await pool.generate([1, 2, 3], OPTIONS)

    asyncio.run(run())


NO_ENGINE = [
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x15\x03\x01\x00\x02\x02\x46",
    b"",
    b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: zstd\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 302 Found\r\nLocation: foo://[x\r\nContent-Length: 0\r\n\r\n",
]


@pytest.mark.parametrize("answer", NO_ENGINE)
def test_what_is_no_engine_at_all_is_an_error_of_the_engine_and_no_defect(answer: bytes) -> None:
    """An engine's port may have gone to another program when the engine ended, or be a proxy's."""

    async def run() -> None:
        async with raw_endpoint(answer) as url, ScriptedEndpoint(INCREMENTAL) as good, \
                EngineClient(url, retries=0) as client, EnginePool([url, good.url], retries=0) as pool:
            for call in (client.version, client.info, client.load, client.pause, client.resume):
                with pytest.raises(EngineError, match=url):
                    await call()
            with pytest.raises(EngineError, match=url):
                await client.score([1, 2, 3])
            assert await pool.versions(30) == {good.url: 7}
            await pool.probe()
            assert_true_answer(await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: None))

    asyncio.run(run())


def test_nobody_is_led_to_another_address() -> None:
    async def run() -> None:
        async with ScriptedEndpoint(INCREMENTAL, INCREMENTAL) as good:
            there = f"HTTP/1.1 307 Moved\r\nLocation: {good.url}/generate\r\nContent-Length: 0\r\n\r\n".encode()
            async with raw_endpoint(there) as url, EnginePool([url, good.url], retries=0) as pool:
                assert_true_answer(await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: None))
                assert "HTTP 307" in pool._members[0].last_failure

    asyncio.run(run())
