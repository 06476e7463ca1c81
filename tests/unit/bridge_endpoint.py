"""A scripted engine: answers ``/generate`` with what a test wants, over a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self

from aiohttp import web

Reply = Callable[[web.Request, dict[str, Any]], Any]


def event(
    new: list[int],
    total: int,
    *,
    finish: dict[str, Any] | None = None,
    spans: list[dict[str, Any]] | None = None,
    version: str = "7",
    prompt: int = 3,
    **meta: Any,
) -> dict[str, Any]:
    """One event of an incremental stream, as SGLang 0.5.23 sends it; the log-prob of token t is -t / 100."""
    fields: dict[str, Any] = {
        "id": "r", "finish_reason": finish, "prompt_tokens": prompt, "weight_version": version, "num_retractions": 0,
        "output_token_logprobs": [[-token / 100, token, None] for token in new], "completion_tokens": total,
        "cached_tokens": 0,
    }
    if finish is not None:
        fields["weight_versions"] = spans if spans is not None else [span(version, 0, total)]
    return {"text": "", "output_ids": new, "meta_info": fields | meta}


def span(version: int | str, start: int, end: int) -> dict[str, Any]:
    """A version span as SGLang writes it."""
    return {"version": str(version), "start": start, "end": end}


LENGTH = {"type": "length", "length": 4}


class ScriptedEndpoint:
    """``replies`` are used up in order by ``/generate``; each is a list of events, bytes, or a handler."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, Any]] = []
        self.controls: list[tuple[str, Any]] = []
        self.url, self.host, self.port = "", "127.0.0.1", 0
        self.control: Reply | None = None
        """Answers control calls instead of the fixed answer."""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_route("*", "/{path:.*}", self._control)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, 0).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _control(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.controls.append((request.path, json.loads(body) if body else None))
        if self.control is not None:
            return await self.control(request, {})
        return web.json_response({"success": True, "weight_version": "7"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        reply = self.replies.pop(0)
        if callable(reply):
            return await reply(request, body)
        if not body["stream"]:
            return web.json_response(reply[-1])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for record in reply:
            data = record if isinstance(record, bytes) else f"data: {json.dumps(record)}\n\n".encode()
            await response.write(data)
            await asyncio.sleep(0)
        if reply and not isinstance(reply[-1], bytes):
            await response.write(b"data: [DONE]\n\n")
        return response


async def drop_connection(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def drop_after(events: list[dict[str, Any]]) -> Reply:
    """Send ``events``, then break the connection."""

    async def reply(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for record in events:
            await response.write(f"data: {json.dumps(record)}\n\n".encode())
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    return reply


async def stay_silent(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    """Never answer."""
    await asyncio.sleep(60)
    return web.Response()


@asynccontextmanager
async def raw_endpoint(answer: bytes) -> AsyncIterator[str]:
    """The address of something that answers every connection with these bytes, and closes it."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read(2**16)
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def has_ipv6() -> bool:
    """Whether this machine has IPv6, at least to itself."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
