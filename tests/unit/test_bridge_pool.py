"""The pool spreads requests, leaves out what it cannot reach, and takes it back when it answers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from sglang_bridge import (
    EngineClient,
    EngineError,
    EnginePool,
    EngineTimeout,
    EngineUnreachable,
    SamplingOptions,
)
from tests.unit.bridge_endpoint import LENGTH, ScriptedEndpoint, drop_after, event, stay_silent

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
            assert pool.healthy_urls == [busy.url]
            await pool.probe()
            await asyncio.gather(*(pool.generate([1, 2, 3], OPTIONS) for _ in range(2)))
            assert len(back.requests) == 2
            assert set(pool.healthy_urls) == {back.url, busy.url}

    asyncio.run(run())


def test_a_left_out_engine_is_asked_again_by_itself() -> None:
    async def run() -> None:
        async with ScriptedEndpoint(drop_after([event([11], 1)]), GOOD) as only, \
                EnginePool([only.url], probe_s=0.05, patience_s=30) as pool:
            with pytest.raises(EngineUnreachable):
                await pool.generate([1, 2, 3], OPTIONS, on_chunk=lambda chunk: None)
            assert pool.healthy_urls == []
            assert (await pool.generate([1, 2, 3], OPTIONS)).output_ids == [11]  # waited until it was back

    asyncio.run(run())


def test_each_failure_in_a_row_leaves_an_engine_out_for_longer() -> None:
    async def run() -> list[float]:
        async with EnginePool([NOBODY], probe_s=10.0, longest_probe_s=35.0, retries=0) as pool:
            pauses = []
            for _ in range(4):
                await pool.probe() if pauses else await pool.versions(5.0)
                (member,) = pool._members
                assert member.probe_at is not None
                pauses.append(member.probe_at - time.monotonic())
            return pauses

    pauses = asyncio.run(run())
    assert [round(pause, -1) for pause in pauses[:2]] == [10, 20]  # the clock has gone on by much less than 5 s
    assert max(pauses) <= 35.0 and min(pauses[2:]) > 30.0


def test_bad_answers_in_a_row_quarantine_an_engine_that_can_be_reached() -> None:
    async def broken(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "out of memory"}}, status=500)

    async def run() -> None:
        async with ScriptedEndpoint(*[broken] * 9) as bad, ScriptedEndpoint(*[GOOD] * 9) as good, \
                EnginePool([bad.url, good.url]) as pool:
            for _ in range(6):
                assert (await pool.generate([1, 2, 3], OPTIONS)).output_ids == [11]
            assert pool.healthy_urls == [good.url]
            assert 2 <= len(bad.requests) <= 3
            assert "out of memory" in pool.failures[bad.url]

    asyncio.run(run())


def test_a_request_that_the_engine_refuses_is_not_sent_elsewhere() -> None:
    async def refuse(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "prompt too long"}}, status=400)

    async def run() -> None:
        async with ScriptedEndpoint(refuse) as one, ScriptedEndpoint(GOOD) as two, \
                EnginePool([one.url, two.url]) as pool:
            with pytest.raises(EngineError, match="prompt too long"):
                await pool.generate([1, 2, 3], OPTIONS)
            assert pool.healthy_urls == [one.url, two.url] and two.requests == []

    asyncio.run(run())


def test_no_engine_gets_more_requests_than_it_may_have() -> None:
    most = 0
    running = 0

    async def count(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return web.json_response(GOOD[0])

    async def run() -> None:
        async with ScriptedEndpoint(*[count] * 12) as one, EnginePool([one.url], max_in_flight=3) as pool:
            answers = await asyncio.gather(*(pool.generate([1, 2, 3], OPTIONS) for _ in range(12)))
            assert len(answers) == len(one.requests) == 12

    asyncio.run(run())
    assert most == 3


def test_a_request_has_a_deadline_that_says_where_it_was() -> None:
    async def run() -> None:
        async with ScriptedEndpoint(stay_silent, stay_silent) as one, \
                EnginePool([one.url], deadline_s=0.3, max_in_flight=1) as pool:
            outcomes = await asyncio.gather(
                *(pool.generate([1, 2, 3], OPTIONS) for _ in range(2)), return_exceptions=True
            )
            texts = sorted(str(outcome) for outcome in outcomes)
            assert all(isinstance(outcome, EngineTimeout) for outcome in outcomes), outcomes
            assert "tried on no engine" in texts[1] or "tried on no engine" in texts[0]
            assert pool.in_flight == {one.url: 0}

    asyncio.run(run())


def test_engines_may_come_and_go_and_the_leaving_one_is_drained() -> None:
    async def run() -> None:
        async with ScriptedEndpoint(slow, slow) as old, ScriptedEndpoint(GOOD, GOOD) as new, \
                EnginePool([old.url], patience_s=30, probe_s=0.05) as pool:
            running = asyncio.create_task(pool.generate([1, 2, 3], OPTIONS))
            while not old.requests:
                await asyncio.sleep(0.01)
            pool.set_urls([new.url])
            assert pool.healthy_urls == []  # the new one has not answered yet
            assert (await pool.generate([1, 2, 3], OPTIONS)).output_ids == [11]
            assert (await running).output_ids == [11]  # what ran on the old one came to its end
            assert len(old.requests) == len(new.requests) == 1
            assert pool.counters.tokens == 2

    asyncio.run(run())


def test_who_waits_for_a_version_hears_of_it_without_a_request() -> None:
    """Engines that left and came back while nothing ran: a rollout sends nothing before it knows their version."""

    async def run() -> None:
        async with ScriptedEndpoint(GOOD) as engine, EnginePool([engine.url]) as pool:
            pool.set_urls([])
            pool.set_urls([engine.url])
            assert pool.healthy_urls == []
            async with asyncio.timeout(10):
                while not await pool.versions(2.0):
                    await asyncio.sleep(0.02)
            assert pool.healthy_urls == [engine.url]

    asyncio.run(run())


class Defect(Exception):
    """Nothing that an engine can do."""


@pytest.mark.parametrize("broken", ["version", "close"])
def test_a_defect_in_the_background_is_not_run_on_with(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """version: asked before an engine is taken back. close: of one that has been drained."""

    async def fail(client: EngineClient) -> None:
        if client.url != good:
            raise Defect("planned")

    async def use(pool: EnginePool) -> None:
        async with asyncio.timeout(10):
            while True:
                await pool.generate([1, 2, 3], OPTIONS)
                await asyncio.sleep(0.02)

    async def run() -> None:
        nonlocal good
        async with ScriptedEndpoint(*[GOOD] * 500) as one, ScriptedEndpoint(*[GOOD] * 500) as two:
            good = one.url
            async with EnginePool([one.url] if broken == "version" else [one.url, two.url]) as pool:
                monkeypatch.setattr(EngineClient, broken, fail)
                pool.set_urls([one.url, two.url] if broken == "version" else [one.url])
                with pytest.raises(RuntimeError, match="planned") as failed:
                    await use(pool)
                assert isinstance(failed.value.__cause__, Defect)
                with pytest.raises(RuntimeError, match="planned"):
                    await pool.versions(1.0)
                monkeypatch.undo()

    good = ""
    asyncio.run(run())


def test_an_engine_with_old_weights_is_not_taken_back() -> None:
    async def run() -> None:
        async with ScriptedEndpoint(GOOD) as old, EnginePool([NOBODY], patience_s=0.2, probe_s=0.05) as pool:
            pool.required_version = 8  # the endpoint says that it holds 7
            pool.set_urls([old.url])
            with pytest.raises(EngineUnreachable, match="holds version 7, but 8 is required"):
                await pool.generate([1, 2, 3], OPTIONS)
            pool.required_version = 7
            await pool.probe()
            assert (await pool.generate([1, 2, 3], OPTIONS)).output_ids == [11]

    asyncio.run(run())


def test_requests_on_an_engine_that_fails_its_health_check_go_elsewhere() -> None:
    async def run() -> None:
        async with ScriptedEndpoint(stay_silent) as frozen, ScriptedEndpoint(GOOD) as good, \
                EnginePool([frozen.url, good.url], health_deadline_s=0.2) as pool:
            running = asyncio.create_task(pool.generate([1, 2, 3], OPTIONS))
            while not frozen.requests:
                await asyncio.sleep(0.01)
            frozen.control = stay_silent
            await pool.check()
            assert (await asyncio.wait_for(running, 30)).output_ids == [11]
            assert pool.healthy_urls == [good.url]
            assert pool.in_flight == {frozen.url: 0, good.url: 0}

    asyncio.run(run())


def test_cancelling_a_caller_is_not_mistaken_for_a_lost_engine() -> None:
    async def run() -> None:
        async with ScriptedEndpoint(stay_silent) as one, EnginePool([one.url]) as pool:
            running = asyncio.create_task(pool.generate([1, 2, 3], OPTIONS))
            while not one.requests:
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert pool.in_flight == {one.url: 0} and pool.healthy_urls == [one.url]

    asyncio.run(run())


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        EnginePool([])
