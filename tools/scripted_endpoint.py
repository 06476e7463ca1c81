"""An engine's HTTP face without a model: what SGLang would send, at a rate that is asked for.

For runs that are about everything but the model: faults, the rollout's event loop, asynchrony. It speaks SGLang's
native protocol as far as `sglang_bridge` uses it, publishing by `transport: disk` included (the weights are not read).
Several requests share it as they share an engine: a decoding step gives every running request a token and takes
`--base-ms` + `--request-ms` for each.

What is said is drawn from phrases that the service desk understands, padded to lengths that are log-normal with a long
tail. A length is a function of the seed, of the prompt, and of how often that prompt came before: the same work in
whatever order it is done.

    python -m tools.scripted_endpoint --model runs/tiny --port 30000
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from tokenizers import Tokenizer

REPLIES = (
    "what is your name?",
    "which order is it?",
    "are you sure?",
    '<tool_call>\n{"name": "get_order", "arguments": {"order_id": "A1"}}\n</tool_call>',
    "done: order A1 is cancelled",
)
FILLER = "please wait"


@dataclass(slots=True, eq=False)
class Request:
    """One running generation. ids: all it will say. sent: tokens sampled. versions: theirs. phase: when its events
    come, so that those of many requests are spread over the decoding steps."""

    ids: list[int]
    limit: int
    phase: int
    sent: int = 0
    versions: list[int] = field(default_factory=list)
    aborted: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        return self.aborted or self.sent >= min(len(self.ids), self.limit)


class Script:
    """What is said after a prompt, and how long it is."""

    def __init__(self, model: Path, seed: int, median: float, sigma: float, longest: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._end = json.loads((model / "config.json").read_text())["eos_token_id"]
        self._seed, self._median, self._sigma, self._longest = seed, median, sigma, longest
        self._filler = self._tokenizer.encode(FILLER, add_special_tokens=False).ids
        self._asked: Counter[bytes] = Counter()

    def answer(self, prompt: list[int]) -> list[int]:
        """Ids of a whole turn, its end included."""
        key = hashlib.blake2b(orjson.dumps(prompt), digest_size=8).digest()
        number, self._asked[key] = self._asked[key], self._asked[key] + 1
        dice = random.Random(f"{self._seed} {key.hex()} {number}")
        said = self._tokenizer.encode(dice.choice(REPLIES), add_special_tokens=False).ids
        wanted = min(self._longest, round(self._median * math.exp(self._sigma * dice.gauss(0, 1))))
        padding = self._filler * math.ceil(max(0, wanted - len(said) - 1) / len(self._filler))
        calls = said if self._tokenizer.decode(said).startswith("<tool_call>") else []
        words = [*padding[: max(0, wanted - len(said) - 1)], *said]
        return [*(said if calls and not padding else words), self._end]


class ScriptedEndpoint:
    """Serves `/generate` by a `Script`, at base_s + k * request_s seconds per decoding step of k requests. interval:
    tokens in one event of a stream. version: the label of the weights that it begins with."""

    def __init__(self, script: Script, base_s: float, request_s: float, interval: int, version: int) -> None:
        self._script, self._base_s, self._request_s, self._interval = script, base_s, request_s, interval
        self._requests = 0
        self._running: set[Request] = set()
        self._go = asyncio.Event()
        self._go.set()
        self.busy_s = 0.0
        self.tokens = 0
        self.version = version

    def app(self) -> web.Application:
        """Routes of the endpoint; the decoding loop runs while it does."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self._generate)
        for path in ("/server_info", "/model_info", "/health", "/ready", "/v1/loads"):
            app.router.add_get(path, self._info)
        for path, handler in {
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/update_weight_version": self._set_version,
            "/update_weights_from_disk": self._well,
            "/flush_cache": self._well,
        }.items():
            app.router.add_post(path, handler)
        app.cleanup_ctx.append(self._decoding)
        return app

    async def _decoding(self, _app: web.Application) -> Any:
        task = asyncio.create_task(self._decode())
        yield
        task.cancel()

    async def _decode(self) -> None:
        """Decoding steps; one that comes late is made up for, up to a step."""
        due = time.monotonic()
        while True:
            await self._go.wait()
            count = len(self._running)
            step = self._base_s + self._request_s * count
            due = max(due, time.monotonic() - step) + step
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not self._go.is_set():
                continue
            self.busy_s += step if count else 0.0
            for request in self._running:
                if request.done:
                    continue
                request.versions.append(self.version)
                request.sent += 1
                self.tokens += 1
                if request.done or (request.sent + request.phase) % self._interval == 0:
                    request.news.set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        prompt, sampling = body["input_ids"], body["sampling_params"]
        if sampling["max_new_tokens"] == 0:
            return web.json_response({"meta_info": {"input_token_logprobs": [[None, t, None] for t in prompt]}})
        self._requests += 1
        work = Request(self._script.answer(prompt), sampling["max_new_tokens"], self._requests)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if body["stream"]:
            await response.prepare(request)
        self._running.add(work)
        shown = 0
        try:
            while True:
                await work.news.wait()
                work.news.clear()
                if work.done:
                    self._running.discard(work)
                if body["stream"] and (work.sent > shown or work.done):
                    await response.write(b"data: " + orjson.dumps(self._event(work, shown, len(prompt))) + b"\n\n")
                    shown = work.sent
                if work.done:
                    break
        except ConnectionResetError:
            return response  # the client went away
        finally:
            self._running.discard(work)
        if not body["stream"]:
            return web.Response(body=orjson.dumps(self._event(work, 0, len(prompt))), content_type="application/json")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, work: Request, shown: int, prompt: int) -> dict[str, Any]:
        new = work.ids[shown : work.sent]
        meta: dict[str, Any] = {
            "completion_tokens": work.sent,
            "prompt_tokens": prompt,
            "output_token_logprobs": [[-0.5, token, None] for token in new],
            "weight_version": str(self.version),
            "finish_reason": None,
            "num_retractions": 0,
        }
        if work.done:
            whole = work.sent == len(work.ids)
            meta["finish_reason"] = {"type": "abort" if work.aborted else "stop" if whole else "length"}
            meta["weight_versions"] = spans(work.versions)
            meta["num_retractions"] = max(0, len(meta["weight_versions"]) - 1)  # updates recompute what they meet
        return {"output_ids": new, "meta_info": meta}

    async def _info(self, _request: web.Request) -> web.Response:
        running = len(self._running)
        load = {"num_running_reqs": running, "num_waiting_reqs": 0, "num_total_tokens": 0}
        return web.json_response(
            {"weight_version": str(self.version), "tp_size": 1, "pp_size": 1, "device": "cpu", "loads": [load],
             "busy_s": self.busy_s, "tokens": self.tokens}
        )  # fmt: skip

    async def _well(self, _request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        self._go.clear()
        return await self._well(request)

    async def _continue(self, request: web.Request) -> web.Response:
        self._go.set()
        return await self._well(request)

    async def _abort(self, request: web.Request) -> web.Response:
        for work in self._running:
            work.aborted = True
            work.news.set()
        return await self._well(request)

    async def _set_version(self, request: web.Request) -> web.Response:
        self.version = int((await request.json())["new_version"])
        return await self._well(request)


def spans(versions: list[int]) -> list[dict[str, Any]]:
    """Half-open spans of equal versions, as SGLang writes them."""
    edges = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
    ends = [*edges[1:], len(versions)]
    return [{"version": str(versions[a]), "start": a, "end": b} for a, b in zip(edges, ends, strict=False)]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory whose tokenizer is used")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--version", type=int, default=0, help="label of the weights that it begins with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parent", type=int, help="process that it ends with; default: none")
    parser.add_argument("--base-ms", type=float, default=5.0, help="of a decoding step")
    parser.add_argument("--request-ms", type=float, default=0.0, help="of a decoding step, per running request")
    parser.add_argument("--interval", type=int, default=4, help="tokens in one event of a stream")
    parser.add_argument("--median", type=float, default=16.0, help="tokens of a turn")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of a turn's tokens: its tail")
    parser.add_argument("--longest", type=int, default=400, help="tokens of a turn at most")
    return parser.parse_args()


def end_with(parent: int) -> None:
    """End this process within a second of its parent's end, however that one ends, as `sglang_bridge.serve` does."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    args = arguments()
    script = Script(args.model, args.seed, args.median, args.sigma, args.longest)

    async def make() -> web.Application:  # inside the server's loop, for the events
        return ScriptedEndpoint(script, args.base_ms / 1e3, args.request_ms / 1e3, args.interval, args.version).app()

    if args.parent is not None:
        threading.Thread(target=end_with, args=(args.parent,), daemon=True).start()
    web.run_app(make(), host="127.0.0.1", port=args.port, backlog=4096, print=None, access_log=None)


if __name__ == "__main__":
    main()
