"""Chat completions from any OpenAI-compatible endpoint, for user simulators and judges.

Invariants
- A request is repeated after a time-out, a broken connection, a busy or failing server (408, 425, 429, 5xx) and an
  answer that cannot be used; a request the server refuses (other 4xx) is not. What remains is `EndpointError`.
- At most `concurrency` requests of one endpoint are in flight in this process, whoever asks.
- Connections belong to an episode (`session`), so nothing outlives it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from megatron_async.rollout.environments.tau2.options import EndpointOptions

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TRY_AGAIN = (408, 409, 425, 429)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0


class EndpointError(RuntimeError):
    """No usable answer: the message has the endpoint, the number of attempts and the last failure."""


class _Refused(RuntimeError):
    """The server will refuse this request however often it is sent."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer: text, tool calls as (name, arguments), tokens used (0 where the server does not say)."""

    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    prompt_tokens: int
    completion_tokens: int


class ChatEndpoint:
    """One endpoint, shared by the episodes of a process. `failures` counts requests that had to be repeated."""

    def __init__(self, options: EndpointOptions) -> None:
        """Raises ValueError when the environment variable with the key is named but not set."""
        self.options = options
        self.failures = 0
        self._slots = asyncio.Semaphore(options.concurrency)
        self._headers = {}
        if options.api_key_env:
            key = os.environ.get(options.api_key_env)
            if not key:
                raise ValueError(
                    f"tau2: the environment variable {options.api_key_env} (api_key_env) is not set"
                )
            self._headers["Authorization"] = f"Bearer {key}"

    def session(self) -> aiohttp.ClientSession:
        """Connections for one episode; the caller closes it."""
        timeout = aiohttp.ClientTimeout(total=self.options.timeout_s)
        return aiohttp.ClientSession(headers=self._headers, timeout=timeout)

    async def complete(
        self,
        session: aiohttp.ClientSession,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        accept: Callable[[Completion], T],
    ) -> T:
        """`accept` of the first answer it does not refuse with ValueError. Raises EndpointError."""
        attempts = self.options.retries + 1
        failure: Exception | None = None
        for attempt in range(attempts):
            if attempt:
                self.failures += 1
                pause = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
                await asyncio.sleep(
                    pause * random.uniform(0.5, 1.0)
                )  # so that episodes do not return all at once
            try:
                async with self._slots:
                    return accept(await self._request(session, messages, tools))
            except _Refused as error:
                raise EndpointError(f"{self.options.url} refuses the request: {error}") from error
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                failure = error
                logger.warning("%s, attempt %d of %d: %r", self.options.url, attempt + 1, attempts, error)
        raise EndpointError(
            f"{self.options.url} gave no usable answer in {attempts} attempts; the last: {failure!r}"
        ) from failure

    async def _request(
        self, session: aiohttp.ClientSession, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> Completion:
        body: dict[str, Any] = {"model": self.options.model, "messages": messages, **self.options.sampling}
        if tools:
            body |= {"tools": tools, "tool_choice": "auto"}
        url = self.options.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        async with session.post(url, json=body) as response:
            text = await response.text()
            if 400 <= response.status < 500 and response.status not in _TRY_AGAIN:
                raise _Refused(f"HTTP {response.status}: {text[:300]}")
            response.raise_for_status()
        return _read(text)


def _read(text: str) -> Completion:
    """Raises ValueError for anything that is not a chat completion with readable tool calls."""
    try:
        value = json.loads(text)
        message = value["choices"][0]["message"]
        calls = tuple(
            (str(call["function"]["name"]), _arguments(call["function"].get("arguments")))
            for call in message.get("tool_calls") or ()
        )
        usage = value.get("usage") or {}
        content = message.get("content") or ""
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a chat completion ({error!r}): {text[:300]!r}") from error
    if not isinstance(content, str):
        raise ValueError(f"the message's content is {type(content).__name__}, not text: {text[:300]!r}")
    return Completion(
        content, calls, int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    )


def _arguments(value: Any) -> dict[str, Any]:
    arguments = json.loads(value) if isinstance(value, str) and value.strip() else (value or {})
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a tool call are not an object: {value!r}")
    return arguments
