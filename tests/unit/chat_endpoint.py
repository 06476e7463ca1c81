"""An OpenAI-compatible chat endpoint over a real socket, answering by a rule and failing on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web

Rule = Callable[[dict[str, Any]], dict[str, Any]]


def text(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def call(name: str, arguments: Any) -> dict[str, Any]:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": written}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


class ChatServer:
    """`rule` makes the message from the request ("cut": it ends at a limit). fail: from the request's number, a status,
    a (status, message), "hang", "junk" or None. usage: what answers say was used; None for a server that does not."""

    def __init__(
        self,
        rule: Rule,
        fail: Callable[[int], int | str | tuple[int, str] | None] = lambda request: None,
        usage: tuple[int, int] | None = (7, 3),
    ) -> None:
        self.rule = rule
        self.fail = fail
        self.usage = usage
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.running = 0
        self.most_running = 0

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        number = len(self.bodies)
        self.bodies.append(await request.json())
        self.keys.add(request.headers.get("Authorization"))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            planned = self.fail(number)
            if planned == "hang":
                await asyncio.sleep(30)
            if planned == "junk":
                return web.Response(text="<html>busy</html>")
            if isinstance(planned, int):
                planned = planned, f"planned {planned}"
            if isinstance(planned, tuple):
                return web.json_response({"error": planned[1]}, status=planned[0])
            await asyncio.sleep(0.01)
            message = dict(self.rule(self.bodies[number]))
            reason = "length" if message.pop("cut", False) else "stop"
            choice = {"message": message, "finish_reason": reason}
            if self.usage is None:
                return web.json_response({"choices": [choice]})
            usage = {"prompt_tokens": self.usage[0], "completion_tokens": self.usage[1]}
            return web.json_response({"choices": [choice], "usage": usage})
        finally:
            self.running -= 1
