"""Chat completions from any OpenAI-compatible endpoint: user simulators, judges, and policies that are evaluated.

Invariants
- A request is repeated after a time-out, a broken connection, a busy or failing server (408, 425, 429, 5xx) and an
  answer that cannot be used; a request the server refuses (other 4xx) is not (`EndpointRefused`). What remains is
  `EndpointError`.
- At most `concurrency` requests of one endpoint are in flight in this process, whoever asks.
- Connections belong to an episode (`session`), so nothing outlives it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from megatron_async.rollout.json_depth import shallow

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TRY_AGAIN = (408, 409, 425, 429)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_QUOTED = 1000
"""Characters of a refusal that are kept."""


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """An OpenAI-compatible chat endpoint.

    url: base URL, e.g. http://host:30000/v1. model: name sent with each request. api_key_env: environment variable
    that holds the key ("" sends none). timeout_s: longest wait for one answer. retries: repetitions after a failure;
    when they are used up the episode fails, and is counted, as an environment error. concurrency: requests in flight
    at once, over all episodes of this process. sampling: merged into each request (temperature, seed, max_tokens, ...).
    """

    url: str = ""
    model: str = "default"
    api_key_env: str = ""
    timeout_s: float = 120.0
    retries: int = 4
    concurrency: int = 64
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})


class KeyNotSet(ValueError):
    """The environment variable that is to hold the key is not set."""


class EndpointError(RuntimeError):
    """No usable answer: the message has the endpoint, the number of attempts and the last failure."""


class EndpointRefused(EndpointError):
    """The server refuses the request itself. status: of HTTP. answer: the beginning of what it said."""

    def __init__(self, message: str, status: int, answer: str) -> None:
        self.status, self.answer = status, answer
        super().__init__(message)


class _Refused(RuntimeError):
    """The server will refuse this request however often it is sent."""

    def __init__(self, message: str, status: int = 400) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    content: its text. calls: tool calls as (name, arguments). prompt_tokens, completion_tokens: used, 0 where the
    server does not say. finish_reason: "length" when a limit cut the answer. problem: what is wrong with a tool call
    that is not among `calls`, because its arguments are no JSON object.
    """

    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str = "stop"
    problem: str | None = None


class ChatEndpoint:
    """One endpoint, shared by the episodes of a process."""

    def __init__(self, options: EndpointOptions) -> None:
        """Raises KeyNotSet when the environment variable with the key is named but not set."""
        self.options = options
        self._slots = asyncio.Semaphore(options.concurrency)
        self._headers = {}
        if options.api_key_env:
            key = os.environ.get(options.api_key_env)
            if not key:
                raise KeyNotSet(
                    f"the environment variable {options.api_key_env} (api_key_env) is not set"
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
        repeated: Callable[[], None] = lambda: None,
    ) -> T:
        """`accept` of the first answer it does not refuse with ValueError. Raises EndpointError.

        repeated: called whenever the request has to be sent again.
        """
        attempts = self.options.retries + 1
        failure: Exception | None = None
        for attempt in range(attempts):
            if attempt:
                repeated()
                pause = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
                await asyncio.sleep(
                    pause * random.uniform(0.5, 1.0)
                )  # so that episodes do not return all at once
            try:
                async with self._slots:
                    return accept(await self._request(session, messages, tools))
            except _Refused as error:
                message = f"{self.options.url} refuses the request: {error}"
                raise EndpointRefused(message, error.status, str(error)) from error
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
                raise _Refused(f"HTTP {response.status}: {text[:_QUOTED]}", response.status)
            response.raise_for_status()
        return _read(text)


def well_formed(completion: Completion) -> Completion:
    """For `accept`, where an answer with a tool call that cannot be read is to be repeated: raises ValueError then."""
    if completion.problem is not None:
        raise ValueError(completion.problem)
    return completion


def _read(text: str) -> Completion:
    """Raises ValueError for anything that is not a chat completion."""
    try:
        value = json.loads(text)
        choice = value["choices"][0]
        message = choice["message"]
        calls, problem = _calls(message.get("tool_calls") or ())
        usage = value.get("usage") or {}
        used = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        content = message.get("content") or ""
        reason = str(choice.get("finish_reason") or "stop")
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a chat completion ({error!r}): {text[:300]!r}") from error
    if not isinstance(content, str):
        raise ValueError(f"the message's content is {type(content).__name__}, not text: {text[:300]!r}")
    return Completion(
        content=content,
        calls=calls,
        prompt_tokens=used[0],
        completion_tokens=used[1],
        finish_reason=reason,
        problem=problem,
    )


def _calls(raw: Any) -> tuple[tuple[tuple[str, dict[str, Any]], ...], str | None]:
    """(calls that can be read, what is wrong with the first that cannot)."""
    calls, problem = [], None
    for call in raw:
        name, value = str(call["function"]["name"]), call["function"].get("arguments")
        try:
            arguments = json.loads(value) if isinstance(value, str) and value.strip() else (value or {})
        except ValueError as error:
            problem = problem or f"the arguments of the call of {name!r} are not JSON ({error}): {value!r}"
            continue
        except RecursionError:
            problem = problem or f"the arguments of the call of {name!r} are nested too deeply"
            continue
        if not shallow(arguments):
            problem = problem or f"the arguments of the call of {name!r} are nested too deeply"
        elif isinstance(arguments, dict):
            calls.append((name, arguments))
        else:
            problem = problem or f"the arguments of the call of {name!r} are not an object: {value!r}"
    return tuple(calls), problem
