"""Processes of the official evaluator: a pool that broke fails those that waited for it, and is replaced once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.rollout.environments.base import EnvironmentFailure
from megatron_async.rollout.environments.tau2 import workers
from megatron_async.rollout.environments.tau2.domain import DomainFiles
from megatron_async.rollout.environments.tau2.reward import Verdict

EPISODE: Any = SimpleNamespace(
    domain=SimpleNamespace(name="retail", solo=False, files=DomainFiles()),
    messages=[],
    termination="user_stop",
    task=SimpleNamespace(id="0"),
)


class Pool:
    """A pool whose calls end when the test says so."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.calls: list[Future[Verdict]] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Verdict]:
        self.calls.append(Future())
        return self.calls[-1]


def test_all_who_waited_for_a_broken_pool_fail_and_one_new_pool_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second of them learns of it when the new pool is at work already."""
    made: list[Pool] = []
    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda *a, **k: made.append(Pool()) or made[-1])
    monkeypatch.setattr(workers, "_pools", {})

    def ask() -> asyncio.Task[Verdict]:
        return asyncio.create_task(workers.official(EPISODE, ("DB",), 2))

    async def run() -> None:
        early, late = ask(), ask()
        await asyncio.sleep(0)
        (first,) = made
        for waiting, call in ((early, first.calls[0]), (late, first.calls[1])):
            call.set_exception(BrokenProcessPool("a process was terminated abruptly"))
            with pytest.raises(EnvironmentFailure, match="worker process .* died .*terminated abruptly"):
                await waiting
            after = ask()
            await asyncio.sleep(0)
            made[1].calls[-1].set_result(Verdict(1.0))
            assert (await after).reward == 1.0

    asyncio.run(run())
    assert [len(pool.calls) for pool in made] == [2, 2]
