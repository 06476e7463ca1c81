"""An engine's HTTP face without a model: `/generate` streams tokens by the rule of `scripted_rollout`.

Speaks SGLang's native protocol as far as `sglang_bridge` uses it, over a real socket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web

from tests.unit.scripted_rollout import END, logprob_of, next_token


class ScriptedEngine:
    """`version` may change at any time: tokens from then on carry the new one, in running requests too.

    turn_length: tokens of a turn, END included, or a function of the request's number. token_s: seconds per token.
    fail: given the number of a request (0, 1, ...), an HTTP status to answer with, or None. stall_at: tokens after
    which an answer stands still until `go_on`; `stalled` counts those that do.
    """

    def __init__(
        self,
        turn_length: int | Callable[[int], int] = 4,
        token_s: float = 0.0,
        fail: Callable[[int], int | None] = lambda request: None,
        stall_at: int | None = None,
    ) -> None:
        self.turn_length = turn_length if callable(turn_length) else lambda request: turn_length
        self.token_s = token_s
        self.fail = fail
        self.stall_at = stall_at
        self.stalled = 0
        self.version = 0
        self.requests = 0
        self.running = 0
        self.most_running = 0
        self.aborts = 0
        self._abort_generation = 0
        self._goes_on = asyncio.Event()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/server_info", self._info)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    def abort_running(self) -> None:
        """End every running request with reason abort and the tokens it has."""
        self._abort_generation += 1

    def go_on(self) -> None:
        """No answer stands still any more."""
        self._goes_on.set()

    async def _stand_still(self) -> None:
        self.stalled += 1
        try:
            await self._goes_on.wait()
        finally:
            self.stalled -= 1

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version)})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        number, self.requests = self.requests, self.requests + 1
        body = await request.json()
        status = self.fail(number)
        if status is not None:
            return web.json_response({"error": {"message": f"planned {status}"}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._stream(response, body, self.turn_length(number))
            await response.write(b"data: [DONE]\n\n")
        except ConnectionResetError:
            pass  # the client went away, as a cancelled episode does
        finally:
            self.running -= 1
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any], turn_length: int) -> None:
        prompt, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        out: list[int] = []
        versions: list[int] = []
        generation = self._abort_generation
        reason = None
        while reason is None:
            await (self._stand_still() if len(out) == self.stall_at else asyncio.sleep(self.token_s))
            if generation != self._abort_generation:
                reason = "abort"
                self.aborts += 1
            else:
                out.append(next_token([*prompt, *out], turn_length))
                versions.append(self.version)
                reason = "stop" if out[-1] == END else "length" if len(out) == limit else None
            meta = {
                "completion_tokens": len(out),
                "prompt_tokens": len(prompt),
                "output_token_logprobs": [[logprob_of(token), token, None] for token in out],
                "weight_version": str(self.version),
                "finish_reason": None if reason is None else {"type": reason},
                "weight_versions": _spans(versions) if reason else None,
            }
            await response.write(
                b"data: " + json.dumps({"output_ids": out, "meta_info": meta}).encode() + b"\n\n"
            )


def _spans(versions: list[int]) -> list[dict[str, Any]]:
    edges = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
    return [
        {"version": str(versions[a]), "start": a, "end": b}
        for a, b in zip(edges, [*edges[1:], len(versions)], strict=True)
    ]
