"""Tokens per second through the bridge, against a bare aiohttp client that sends the same load to the same server.

    python tools/benchmark_bridge.py                        # starts a server with a tiny random Qwen3-MoE
    python tools/benchmark_bridge.py --url http://127.0.0.1:30000 --rounds 6

Two ways of asking are measured, whole answers and streams, each bridge against bare. The runs of a round are
interleaved in random order and compared within the round, so that a change of the machine's load hits both. The
figure `bridge_tokens_ratio` holds both ratios (medians over the rounds). Rows go to docs/benchmarks/bridge.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from megatron_async.rollout.environments.desk_checkpoint import write_tiny_checkpoint
from sglang_bridge import EngineClient, EngineServer, SamplingOptions, ServerOptions
from tools.benchmark_rows import Row, write_rows

Ask = Callable[[list[int]], Awaitable[int]]


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random prompts; new ones each time, so that no prefix is cached."""
    source = random.Random(seed)
    return [[source.randrange(10, 500) for _ in range(length)] for _ in range(count)]


def bare_body(prompt: list[int], new_tokens: int, stream: bool) -> dict[str, Any]:
    """The same request as the bridge's."""
    params = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True, "skip_special_tokens": False}
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": stream}


async def bare_whole(session: aiohttp.ClientSession, url: str, prompt: list[int], new_tokens: int) -> int:
    """One answer, read and parsed, nothing checked."""
    async with session.post(f"{url}/generate", json=bare_body(prompt, new_tokens, stream=False)) as response:
        return len((await response.json())["output_ids"])


async def bare_stream(session: aiohttp.ClientSession, url: str, prompt: list[int], new_tokens: int) -> int:
    """One stream, every event parsed, nothing checked."""
    tokens = 0
    async with session.post(f"{url}/generate", json=bare_body(prompt, new_tokens, stream=True)) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                tokens += len(json.loads(line[6:])["output_ids"])
    return tokens


async def tokens_per_second(ask: Ask, load: list[list[int]]) -> float:
    """All prompts at once."""
    started = time.perf_counter()
    tokens = sum(await asyncio.gather(*(ask(prompt) for prompt in load)))
    return tokens / (time.perf_counter() - started)


async def measure(url: str, rounds: int, concurrency: int, prompt: int, new: int) -> dict[str, list[float]]:
    """Tokens per second of each way of asking, one value per round."""
    options = SamplingOptions(max_new_tokens=new, ignore_eos=True)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, EngineClient(url) as client:

        async def bridge_whole(ids: list[int]) -> int:
            return len((await client.generate(ids, options)).output_ids)

        async def bridge_stream(ids: list[int]) -> int:
            return len((await client.generate(ids, options, on_chunk=lambda chunk: None)).output_ids)

        ways: dict[str, Ask] = {
            "bare_whole": lambda ids: bare_whole(session, url, ids, new), "bridge_whole": bridge_whole,
            "bare_stream": lambda ids: bare_stream(session, url, ids, new), "bridge_stream": bridge_stream,
        }
        results: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(-1, rounds):  # the first round warms up
            order = list(ways)
            random.Random(index).shuffle(order)
            for place, name in enumerate(order):
                load = prompts(concurrency, prompt, seed=1000 * index + place)
                speed = await tokens_per_second(ways[name], load)
                if index >= 0:
                    results[name].append(speed)
    return results


@contextmanager
def engine(url: str) -> Iterator[str]:
    """The given engine, or one with a tiny random model."""
    if url:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_tiny_checkpoint(checkpoint, seed=0)
        options = ServerOptions(dtype="float32", mem_fraction_static=0.1)
        with EngineServer(checkpoint, log_path=Path(folder) / "server.log", options=options) as server:
            yield server.url


def main() -> None:
    """Measure, print, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="", help="a running engine; empty starts one")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    with engine(options.url) as url:
        results = asyncio.run(measure(
            url, options.rounds, options.concurrency, options.prompt_tokens, options.new_tokens
        ))
    medians = {name: statistics.median(values) for name, values in results.items()}
    ratios = [statistics.median(b / a for a, b in zip(results[f"bare_{way}"], results[f"bridge_{way}"]))
              for way in ("whole", "stream")]
    conditions = (f"whole answers, streams; tiny random Qwen3-MoE float32, {options.concurrency} requests at once, "
                  f"{options.prompt_tokens} tokens in, {options.new_tokens} out, median of {options.rounds} rounds")
    for name, value in medians.items():
        print(f"{name:14s} {value:8.0f} tokens/s")
    print(f"ratio whole {ratios[0]:.3f}, stream {ratios[1]:.3f}")
    command = "python tools/benchmark_bridge.py"
    write_rows("bridge", [
        Row("bridge_tokens_ratio", [round(ratio, 4) for ratio in ratios], "", ">= 0.95", conditions, command),
        Row("bridge_tokens_per_second", [round(medians[f"bridge_{way}"], 1) for way in ("whole", "stream")],
            "tokens/s", "", conditions, command),
    ])


if __name__ == "__main__":
    main()
