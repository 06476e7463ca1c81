"""The pool spreads requests, leaves out what it cannot reach, and takes it back when it answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from sglang_bridge import EnginePool, EngineUnreachable, SamplingOptions
from tests.unit.bridge_endpoint import LENGTH, ScriptedEndpoint, drop_after, event

OPTIONS = SamplingOptions(max_new_tokens=10)
GOOD = [event([11], 1, finish=LENGTH)]
NOBODY = "http://127.0.0.1:9"


async def slow(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    """A good answer after a while."""
    await asyncio.sleep(0.1)
    return web.json_response(GOOD[0])


def test_requests_go_to_the_least_loaded_engine() -> None:
    async def run() -> list[int]:
        async with ScriptedEndpoint(*[slow] * 9) as one, ScriptedEndpoint(*[slow] * 9) as two, \
                EnginePool([one.url, two.url]) as pool:
            await asyncio.gather(*(pool.generate([1, 2, 3], OPTIONS) for _ in range(9)))
            assert set(pool.in_flight.values()) == {0}
            assert pool.counters.tokens == 9
            return sorted([len(one.requests), len(two.requests)])

    assert asyncio.run(run()) == [4, 5]


def test_an_engine_that_cannot_be_reached_is_left_out_and_its_request_goes_elsewhere() -> None:
    async def run() -> None:
        async with ScriptedEndpoint(*[GOOD] * 4) as good, EnginePool([NOBODY, good.url], retries=0) as pool:
            for _ in range(4):
                assert (await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: None)).output_ids == [11]
            assert pool.healthy_urls == [good.url]
            assert len(good.requests) == 4

    asyncio.run(run())


def test_a_request_with_tokens_delivered_is_not_sent_elsewhere() -> None:
    async def run() -> None:
        async with ScriptedEndpoint(drop_after([event([11], 1)])) as breaks, ScriptedEndpoint(GOOD) as other, \
                EnginePool([breaks.url, other.url]) as pool:
            with pytest.raises(EngineUnreachable, match=breaks.url):
                await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: None)
            assert other.requests == []
            assert pool.healthy_urls == [other.url]

    asyncio.run(run())


def test_all_engines_gone_is_an_error_that_lists_them() -> None:
    async def run() -> None:
        async with EnginePool([NOBODY, "http://127.0.0.1:19"], retries=0) as pool:
            with pytest.raises(EngineUnreachable, match=rf"no engine of 2 can be reached: {NOBODY}.*127.0.0.1:19"):
                await pool.generate([1, 2, 3], OPTIONS)

    asyncio.run(run())


def test_an_engine_that_answers_again_gets_requests_again() -> None:
    async def run() -> None:
        async with ScriptedEndpoint(drop_after([event([11], 1)]), GOOD) as back, \
                ScriptedEndpoint(*[slow] * 3) as busy, EnginePool([back.url, busy.url], probe_s=0.1) as pool:
            with pytest.raises(EngineUnreachable):
                await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: None)
            await asyncio.sleep(0.15)
            await asyncio.gather(*(pool.generate([1, 2, 3], OPTIONS) for _ in range(2)))
            assert len(back.requests) == 2
            assert set(pool.healthy_urls) == {back.url, busy.url}

    asyncio.run(run())


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        EnginePool([])
