"""``EngineClient``: one SGLang engine over its native HTTP API, token ids in, token ids out.

Invariants
- Nothing waits for ever: connecting, every control call and every silence of a stream has a deadline, and the
  error names the engine and what was waited for.
- A request is sent again only when that cannot change what the caller sees: control calls that are idempotent,
  and a generation whose connection broke before its first token.
- Controlling an engine never aborts its requests unless that is what the call is for.

One client serves any number of concurrent requests of one event loop. It opens its connections on first use::

    async with EngineClient("http://127.0.0.1:30000") as client:
        answer = await client.generate([1, 2, 3], SamplingOptions(max_new_tokens=16))
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import orjson

from sglang_bridge.errors import EngineError, EngineTimeout, EngineUnreachable
from sglang_bridge.protocol import Answer, Chunk, Generation, SamplingOptions, parse_scores, parse_version

PauseMode = Literal["retract", "abort", "in_place"]
OnChunk = Callable[[Chunk], None | Awaitable[None]]

# SGLang closes a connection after 5 s without a request; a client that keeps it longer sends into a closed socket.
_KEEP_ALIVE_S = 3.0
# Routed experts of a whole sequence are the largest thing an event carries.
_LARGEST_RECORD = 2**30
_LOAD_COUNTS = ("num_running_reqs", "num_waiting_reqs", "num_total_tokens")
_CONNECTION_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)


@dataclass(slots=True)
class ClientCounters:
    """What this client has seen since it was made. Tokens are output tokens."""

    requests: int = 0
    tokens: int = 0
    aborted_requests: int = 0
    aborted_tokens: int = 0
    retries: int = 0
    errors: int = 0

    def add(self, other: ClientCounters) -> None:
        """Count what ``other`` has counted, too."""
        for name in ClientCounters.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class EngineClient:
    """Requests to, and control of, one engine.

    Args:
        url: base address, ``http://host:port``.
        api_key: sent as a bearer token with every request; needed when the engine was started with one.
        control_deadline_s: longest wait for a control call's answer.
        stall_s: longest silence of a generation stream; longer than a weight update pauses the engine.
        retries: further attempts when a connection breaks where sending again is safe.
        vocab_size: when given, token ids outside ``[0, vocab_size)`` are refused here. SGLang 0.5.23 lets some of
            them through to the model, where one such id ends the whole engine.
        routed_experts_shape: (MoE layers, top-k) of the model; needed to ask for routed experts.
        in_place_updates: the engine's weights are updated with ``pause_mode="in_place"``, which keeps keys and
            values: spans then carry ``kv_version``. ``oldest_cached_version`` is what a reused prefix may date from
            (the version at the last flush; set it again after one).
        router: the address is a router's, with several engines behind it: what one answer says of its engine is nothing
            to conclude from about the next one's.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        control_deadline_s: float = 60.0,
        stall_s: float = 300.0,
        retries: int = 2,
        vocab_size: int | None = None,
        routed_experts_shape: tuple[int, int] | None = None,
        in_place_updates: bool = False,
        router: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self.control_deadline_s = control_deadline_s
        self.stall_s = stall_s
        self.retries = retries
        self.vocab_size = vocab_size
        self.routed_experts_shape = routed_experts_shape
        self.in_place_updates = in_place_updates
        self.router = router
        self.oldest_cached_version = 0
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._label: str | None = None  # the version last seen on the engine, None until there is one
        self.counters = ClientCounters()
        self._session: aiohttp.ClientSession | None = None

    # -- life cycle -------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; running requests of this client are aborted by the engine."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=2**18)
        return self._session

    # -- generation -------------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        options: SamplingOptions,
        *,
        rid: str | None = None,
        on_chunk: OnChunk | None = None,
        return_routed_experts: bool = False,
    ) -> Generation:
        """Sample one continuation of ``input_ids``.

        ``rid`` names the request for ``abort``. ``on_chunk`` is called (and awaited, when it is a coroutine
        function) with every ``Chunk`` as it arrives; with it the answer is streamed. Cancelling the call closes
        the connection, and the engine then aborts the request.

        Raises:
            EngineError: the engine refused the request or its answer contradicts itself.
            EngineTimeout: no event for ``stall_s``.
            EngineUnreachable: the connection could not be opened, or broke.
            ValueError: the prompt is empty or holds an id outside the vocabulary.
        """
        self._check_prompt(input_ids)
        shape = self._expected_experts(return_routed_experts)
        body: dict[str, Any] = {
            "rid": rid or uuid.uuid4().hex,
            "input_ids": list(input_ids),
            "sampling_params": options.as_request(),
            "return_logprob": True,
            "stream": on_chunk is not None,
        }
        if return_routed_experts:
            body["return_routed_experts"] = True
        self.counters.requests += 1
        attempt = 0
        while True:
            answer = Answer(len(input_ids), options.max_new_tokens, shape, self.in_place_updates,
                            self.oldest_cached_version, self._label, self.vocab_size)
            try:
                generation = await self._collect(body, answer, on_chunk)
                break
            except EngineUnreachable:
                self._label = None  # what comes back on this address may be another process
                if attempt >= self.retries or answer.output_ids:
                    self.counters.errors += 1
                    raise
                attempt += 1
                self.counters.retries += 1
                await asyncio.sleep(0.05 * 2**attempt)
            except EngineError:
                self.counters.errors += 1
                raise
        self._count(generation)
        return generation

    async def _collect(self, body: Mapping[str, Any], answer: Answer, on_chunk: OnChunk | None) -> Generation:
        try:
            async for event in self._events(body):
                chunk = answer.add(event)
                if chunk is not None and not self.router:
                    self._label = chunk.version_on_arrival
                if chunk is not None and on_chunk is not None:
                    waiting = on_chunk(chunk)
                    if inspect.isawaitable(waiting):
                        await waiting
            return answer.finish()
        except EngineError as error:
            if answer.finished and isinstance(error, EngineUnreachable | EngineTimeout):
                return answer.finish()  # it broke behind the last event
            if error.url:
                raise
            raise type(error)(error.text, status=error.status, url=self.url) from error

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[object]:
        """Decoded events of one request: a single one without streaming, one per SSE record with it."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.control_deadline_s, sock_read=self.stall_s)
        what = f"generation {body['rid']}"
        try:
            async with self._http().post(
                f"{self.url}/generate", data=orjson.dumps(body), timeout=timeout,
                headers=self._headers, allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise EngineError(_error_text(await response.read()), status=response.status, url=self.url)
                if not body["stream"]:
                    yield self._decode(await response.read(), what)
                    return
                async for record in _sse_records(response.content):
                    yield self._decode(record, what)
        except TimeoutError as error:
            raise EngineTimeout(f"{what}: no answer for {self.stall_s:g} s", url=self.url) from error
        except _CONNECTION_ERRORS as error:
            raise EngineUnreachable(f"{what}: {_describe(error)}", url=self.url) from error
        except aiohttp.ClientError as error:
            raise EngineError(f"{what}: {_no_answer(error)}", url=self.url) from error

    def _decode(self, record: bytes, what: str) -> object:
        try:
            return orjson.loads(record)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{what}: not JSON ({error}): {record[:120]!r}", url=self.url) from error

    def _check_prompt(self, input_ids: Sequence[int]) -> None:
        if len(input_ids) == 0:
            raise ValueError("the prompt is empty; an engine needs at least one token")
        low, high = min(input_ids), max(input_ids)
        if low < 0 or (self.vocab_size is not None and high >= self.vocab_size):
            raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary [0, {self.vocab_size})")

    def _expected_experts(self, asked: bool) -> tuple[int, int] | None:
        if not asked:
            return None
        if self.routed_experts_shape is None:
            raise ValueError("return_routed_experts needs EngineClient(routed_experts_shape=(MoE layers, top-k))")
        return self.routed_experts_shape

    def _count(self, generation: Generation) -> None:
        self.counters.tokens += len(generation.output_ids)
        if generation.finish_reason == "abort":
            self.counters.aborted_requests += 1
            self.counters.aborted_tokens += len(generation.output_ids)

    async def score(self, input_ids: Sequence[int], *, start: int = 0) -> list[float]:
        """Token-aligned log-probs of a prompt: ``[t]`` = log p(token t | tokens < t), 0.0 for t <= ``start``.

        With ``start`` > 0 the engine may reuse cached keys and values of the tokens before it; with 0 it recomputes.
        """
        self._check_prompt(input_ids)
        if not 0 <= start < len(input_ids):
            raise ValueError(f"start {start} is outside the prompt of {len(input_ids)} tokens")
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
        }
        return parse_scores(await self._call("POST", "/generate", body), input_ids, start)

    # -- control ----------------------------------------------------------------------------------------------

    async def health(self) -> bool:
        """True when the engine's scheduler answers (also while it is paused)."""
        try:
            await self.check()
        except EngineError:
            return False
        return True

    async def check(self) -> None:
        """Ask the engine's scheduler whether it is there, or the router whether an engine is behind it.

        Raises ``EngineError``."""
        await self._call("GET", "/readiness" if self.router else "/server_info")

    async def info(self) -> dict[str, Any]:
        """``/server_info``: the server's arguments and live state, through its scheduler."""
        return await self._call("GET", "/server_info")

    async def load(self) -> dict[str, Any]:
        """Running and waiting requests and tokens in use (first data-parallel rank)."""
        loads = (await self._call("GET", "/v1/loads")).get("loads")
        load = loads[0] if isinstance(loads, list) and loads else None
        if not isinstance(load, dict) or any(type(load.get(name)) is not int for name in _LOAD_COUNTS):
            raise EngineError(f"/v1/loads: its first entry has no {', '.join(_LOAD_COUNTS)}: {loads!r:.200}",
                              url=self.url)
        return load

    async def version(self) -> int:
        """The version of the weights the engine samples with now."""
        version = parse_version((await self._call("GET", "/model_info")).get("weight_version"))
        self._label = str(version)
        return version

    async def set_version(self, version: int) -> None:
        """Label the weights ``version``. Running requests go on; their spans change at this point.

        Exact while the engine is paused by retraction, or runs without SGLang's overlapped scheduling; otherwise the
        token that is being sampled may get the new label.
        """
        await self._call("POST", "/update_weight_version",
                         {"new_version": str(version), "abort_all_requests": False})
        self._label = str(version)

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling. ``retract``: running requests wait and are recomputed; ``abort``: they end with what
        they have; ``in_place``: they wait and keep their keys and values."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Sample again after ``pause``."""
        await self._call("POST", "/continue_generation", {})

    async def abort(self, rid: str) -> None:
        """End one request; it finishes with reason ``abort`` and the tokens it has."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End every request of the engine, other clients' too."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def flush_cache(self) -> None:
        """Forget every cached prefix. Refused by the engine while requests hold keys and values."""
        await self._call("POST", "/flush_cache")

    async def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST to any other control endpoint of SGLang; ``EngineError`` when it reports no success.

        Sent again when the connection breaks, so for idempotent calls, unless the client has ``retries=0``.
        """
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One idempotent control call; the JSON object it answers (empty when it answers none)."""
        timeout = aiohttp.ClientTimeout(total=self.control_deadline_s)
        data = None if body is None else orjson.dumps(body)
        for attempt in range(self.retries + 1):
            try:
                async with self._http().request(
                    method, self.url + path, data=data, timeout=timeout,
                    headers=self._headers, allow_redirects=False,
                ) as response:
                    content = await response.read()
                    return self._control_answer(path, response.status, content)
            except TimeoutError as error:
                raise EngineTimeout(f"{path}: no answer for {self.control_deadline_s:g} s", url=self.url) from error
            except _CONNECTION_ERRORS as error:
                if attempt == self.retries:
                    raise EngineUnreachable(f"{path}: {_describe(error)}", url=self.url) from error
                self.counters.retries += 1
                await asyncio.sleep(0.1 * 2**attempt)
            except aiohttp.ClientError as error:
                raise EngineError(f"{path}: {_no_answer(error)}", url=self.url) from error
        raise AssertionError("unreachable: the loop returns or raises")

    def _control_answer(self, path: str, status: int, content: bytes) -> dict[str, Any]:
        if status != 200:
            raise EngineError(f"{path}: {_error_text(content)}", status=status, url=self.url)
        if not content.lstrip().startswith(b"{"):
            return {}
        answer = self._decode(content, path)
        if not isinstance(answer, dict) or answer.get("success") is False:
            raise EngineError(f"{path}: {_error_text(content)}", url=self.url)
        return answer


async def _sse_records(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Payloads of server-sent ``data:`` records, up to ``[DONE]``."""
    pending = b""
    async for block in content.iter_any():
        pending += block
        if len(pending) > _LARGEST_RECORD:
            raise EngineError(f"an event of the stream is longer than {_LARGEST_RECORD} bytes: {pending[:80]!r}")
        if b"\n\n" not in block and b"\n\n" not in pending[-len(block) - 1:]:
            continue
        *records, pending = pending.split(b"\n\n")
        for record in records:
            payload = record.strip()
            if not payload.startswith(b"data:"):
                continue  # comments and keep-alives
            payload = payload[5:].strip()
            if payload == b"[DONE]":
                return
            yield payload
    if pending.strip():
        raise EngineError(f"the stream broke off in the middle of an event: {pending[:80]!r}")


def _error_text(content: bytes) -> str:
    """The message of an error answer, whichever of SGLang's shapes it has."""
    text = content[:2000].decode("utf-8", "replace").strip()
    if not text.startswith("{"):
        return text or "(empty answer)"
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        return text
    error = answer.get("error", answer)
    if isinstance(error, Mapping):
        return str(error.get("message", error))
    return str(error)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _no_answer(error: aiohttp.ClientError) -> str:
    """What came instead of an HTTP answer: whoever listens there may be no engine at all."""
    return f"what listens there does not speak HTTP: {' '.join(_describe(error).split()):.300}"
