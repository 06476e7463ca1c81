"""Requests that are under way while a test does something to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from sglang_bridge import Chunk, EngineClient, Generation, SamplingOptions

T = TypeVar("T")


def with_client(url: str, call: Callable[[EngineClient], Coroutine[Any, Any, T]], **options: Any) -> T:
    """Run ``call`` with a client of the engine at ``url``."""

    async def run() -> T:
        async with EngineClient(url, **options) as client:
            return await call(client)

    return asyncio.run(run())


def generate_around(
    url: str,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    after_tokens: int,
    action: Callable[[], object],
    **client_options: Any,
) -> list[Generation]:
    """Continue all ``prompts`` at once; run ``action`` (it may block) once each has ``after_tokens`` tokens."""

    async def run(client: EngineClient) -> list[Generation]:
        received = [0] * len(prompts)
        under_way = asyncio.Event()

        def note(index: int) -> Callable[[Chunk], None]:
            def on_chunk(chunk: Chunk) -> None:
                received[index] += len(chunk.output_ids)
                if min(received) >= after_tokens:
                    under_way.set()

            return on_chunk

        running = [asyncio.create_task(client.generate(prompt, options, on_chunk=note(index)))
                   for index, prompt in enumerate(prompts)]
        await asyncio.wait_for(under_way.wait(), 60)
        await asyncio.to_thread(action)
        return await asyncio.gather(*running)

    return with_client(url, run, **client_options)
