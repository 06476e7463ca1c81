"""The engines of a run as the rollout sees them: their addresses, a pool of clients, and the version they sample with.

Invariants: `EngineVersions.version` is never newer than the version that any healthy engine samples with; requests go
only to engines that the roster calls serving.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron_async.config.schema import RunConfig
from megatron_async.engine_key import read_key
from megatron_async.errors import UserError
from megatron_async.roster import read_roster, read_router, roster_file
from sglang_bridge import EnginePool

T = TypeVar("T")

_QUERY_S = 2.0
_FOLLOW_S = 0.5
_HEALTH_S = 30.0


def engine_urls(run_path: Path) -> list[str]:
    """Addresses of the serving engines of a run. Raises UserError when none is listed."""
    urls = [engine.url for engine in read_roster(run_path) if engine.serves]
    if not urls:
        raise UserError(f"{roster_file(run_path)} lists no engine that serves")
    return urls


async def serving_engines(run_path: Path, deadline_s: float) -> list[str]:
    """Addresses of the serving engines of a run; waits while there is none, since one may be being started again.

    Raises UserError when there is none at the deadline, or no roster at all.
    """
    limit = time.monotonic() + deadline_s
    while not any(engine.serves for engine in read_roster(run_path)) and time.monotonic() < limit:
        await asyncio.sleep(_FOLLOW_S)
    return engine_urls(run_path)


def of_run(run_path: Path, urls: Sequence[str]) -> bool:
    """Whether these are the engines of that run, which come and go as its roster says."""
    return roster_file(run_path).exists() and set(urls) <= {engine.url for engine in read_roster(run_path)}


def build_pool(config: RunConfig, urls: list[str]) -> EnginePool:
    """A pool of clients that know the model's vocabulary, the engines' key, the router if there is one, and the routed
    experts when they are recorded. A request waits half a turn's deadline while there is no engine at all."""
    model = json.loads((Path(config.model.path) / "config.json").read_text())
    shape = (moe_layers(model), int(model["num_experts_per_tok"])) if config.engines.routed_experts else None
    deadline = config.rollout.turn_deadline_s
    router = read_router(config.run_path) if config.engines.router and roster_file(config.run_path).exists() else ""
    return EnginePool(
        urls,
        deadline_s=deadline,
        patience_s=deadline / 2,
        max_in_flight=config.engines.max_in_flight,
        health_deadline_s=config.engines.health_deadline_s + config.publish.deadline_s,
        router=router,
        api_key=read_key(config.run_path),
        stall_s=deadline,
        vocab_size=int(model["vocab_size"]),
        routed_experts_shape=shape,
    )


async def with_engines(pool: EnginePool, run_path: Path, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; meanwhile the pool has the engines that the run's roster calls serving, and asks them for
    their health. An error of either ends both and is raised."""
    doing = asyncio.ensure_future(work)
    beside = [asyncio.ensure_future(_follow(pool, run_path)), asyncio.ensure_future(_check(pool))]
    try:
        await asyncio.wait([doing, *beside], return_when=asyncio.FIRST_COMPLETED)
        for watcher in beside:
            if watcher.done():
                watcher.result()  # they never end by themselves
        return await doing
    finally:
        for task in (doing, *beside):
            task.cancel()
        await asyncio.gather(doing, *beside, return_exceptions=True)


async def _follow(pool: EnginePool, run_path: Path) -> None:
    """Roster files are small, so a change is looked for by reading them."""
    known = [client.url for client in pool.clients]
    while True:
        await asyncio.sleep(_FOLLOW_S)
        urls = [engine.url for engine in read_roster(run_path) if engine.serves]
        if urls != known:
            pool.set_urls(urls)
            known = urls


async def _check(pool: EnginePool) -> None:
    while True:
        await asyncio.sleep(_HEALTH_S)
        await pool.check()


def moe_layers(model: dict[str, Any]) -> int:
    """Number of layers with routed experts in a Hugging Face Qwen3-MoE configuration; 0 for a dense model."""
    if not model.get("num_experts"):
        return 0
    dense, step = set(model.get("mlp_only_layers") or ()), int(model.get("decoder_sparse_step") or 1)
    return sum(i not in dense and (i + 1) % step == 0 for i in range(int(model["num_hidden_layers"])))


class EngineVersions:
    """The oldest version that the healthy engines sample with; asked again only while it is not the newest.

    age: what tells old from new; updates behind a version, where ids say less.
    """

    def __init__(self, pool: EnginePool, age: Callable[[int], int] = lambda version: version) -> None:
        self._pool = pool
        self._age = age
        self.version: int | None = None
        self.problem = ""

    async def refresh(self, newest: int) -> int | None:
        """Ask the engines unless they are known to have `newest`; None until they have answered once.

        An engine that does not answer within two seconds leaves the version as it was and is named in `problem`; it is
        left out of the pool until it holds a version that is no older.
        """
        if self.version == newest:
            return self.version
        asked = self._pool.healthy_urls
        answers = await self._pool.versions(_QUERY_S)
        silent = [self._pool.failures.get(url, url) for url in asked if url not in answers]
        self.problem = "; ".join(silent) if asked else "no engine is healthy"
        if answers and not silent:
            self.version = min(answers.values(), key=self._age)
            self._pool.required_version = self.version
        return self.version
