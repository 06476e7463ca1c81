"""``EnginePool``: one face for several engines, which may come and go.

Invariants
- A request goes to the serving engine with the fewest requests of this pool in flight, and never to more than
  ``max_in_flight`` at once; it waits for a place, or for an engine, until its deadline at the longest.
- A request whose engine breaks, falls silent or answers with nonsense is sent to another one, as long as no token of it
  was delivered. After that only the caller knows what to keep: the error is raised, and what is sent next, the partial
  ids included, goes to another engine.
- An engine that is left out takes requests again only after it answered and holds ``required_version``; each failure in
  a row leaves it out for twice as long (quarantine).
- An engine taken off the list gets no new request; those it has are finished (drained).
- A request with a ``min_version`` goes to no engine that is known to hold an older one, and waits for one that is newer
  without keeping others from a place.
- A defect in what the pool does beside requests (asking for health, draining) is raised to whoever asks for anything
  next, and ever after; that an engine fails is none.
- Control (pause, version, weights) is not the pool's: it goes to each engine, through the publisher.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from sglang_bridge.client import ClientCounters, EngineClient, OnChunk
from sglang_bridge.errors import EngineError, EngineTimeout, EngineUnreachable
from sglang_bridge.members import Member
from sglang_bridge.protocol import Chunk, Generation, SamplingOptions

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_ASK_VERSIONS_S = 0.5
# Answers of a healthy engine that refuses this request: another engine would refuse it too.
_NOT_NOW = (408, 425, 429)


@dataclass(slots=True)
class _Way:
    """Where a request may go and has been: the oldest version it accepts, addresses it was sent to, tokens of it that
    were delivered."""

    min_version: int = 0
    tried: list[str] = field(default_factory=list)
    delivered: int = 0


class EnginePool:
    """Spreads generations over the engines at ``urls``; further keyword arguments go to each ``EngineClient``.

    Args:
        probe_s: an engine left out is asked for its health again this long after, twice as long after each failure.
        longest_probe_s: but never later than this.
        health_deadline_s: longest wait for the answer to one health check.
        deadline_s: longest time for one ``generate``, waiting for a place and all engines it is tried on included.
        patience_s: how long ``generate`` waits while there is no engine at all; 0 raises at once.
        max_in_flight: most requests of this pool on one engine; further ones wait here, where they can still go to
            another engine.
        attempts: engines one request is tried on, the same one again where there is no other.
        router: address of a router in front of the engines: requests go there, everything else to the engines.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        probe_s: float = 5.0,
        longest_probe_s: float = 60.0,
        health_deadline_s: float = 10.0,
        deadline_s: float = 3600.0,
        patience_s: float = 0.0,
        max_in_flight: int = 4096,
        attempts: int = 3,
        router: str = "",
        **client_options: Any,
    ) -> None:
        if not urls:
            raise ValueError("a pool needs at least one engine url")
        if max_in_flight < 1 or attempts < 1:
            raise ValueError(f"max_in_flight and attempts must be at least 1, got {max_in_flight} and {attempts}")
        self.probe_s = probe_s
        self.longest_probe_s = longest_probe_s
        self.health_deadline_s = health_deadline_s
        self.deadline_s = deadline_s
        self.patience_s = patience_s
        self.max_in_flight = max_in_flight
        self.attempts = attempts
        self.required_version = 0
        self._client_options = client_options
        self._members = [self._member(url) for url in urls]
        self._router = Member(EngineClient(router, router=True, **client_options)) if router else None
        self._draining: list[Member] = []
        self._gone = ClientCounters()
        self._queue = asyncio.Lock()
        self._nobody_since: float | None = None
        self._asked_all_at = self._asked_versions_at = -math.inf
        self._tasks: set[asyncio.Task[None]] = set()
        self._defect: BaseException | None = None

    def _member(self, url: str) -> Member:
        return Member(EngineClient(url, **self._client_options))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections to every engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._all():
            await member.client.close()

    def _all(self) -> list[Member]:
        return [*self._watched, *self._draining]

    @property
    def _samplers(self) -> list[Member]:
        """Where requests go."""
        return self._members if self._router is None else [self._router]

    @property
    def _watched(self) -> list[Member]:
        return self._members if self._router is None else [*self._members, self._router]

    # -- what it holds ------------------------------------------------------------------------------------------

    @property
    def clients(self) -> list[EngineClient]:
        """The client of each engine, in the order of ``urls``."""
        return [member.client for member in self._members]

    @property
    def healthy_urls(self) -> list[str]:
        """Engines that take requests now."""
        return [member.client.url for member in self._members if member.serves]

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests of this pool running on each engine."""
        return {member.client.url: member.in_flight for member in self._members}

    @property
    def failures(self) -> dict[str, str]:
        """Why each engine that is left out was."""
        return {member.client.url: member.last_failure for member in self._members if not member.serves}

    @property
    def counters(self) -> ClientCounters:
        """Sum of the counters of all clients, those of engines that left included."""
        total = ClientCounters()
        for counters in (self._gone, *(member.client.counters for member in self._all())):
            total.add(counters)
        return total

    def set_urls(self, urls: Sequence[str]) -> None:
        """The engines from now on. New ones are asked for their health and version before they get a request; those no
        longer named are drained. An empty list keeps nothing: requests wait for ``patience_s``."""
        wanted = list(dict.fromkeys(url.rstrip("/") for url in urls))
        known = {member.client.url: member for member in self._members}
        for url, member in known.items():
            if url not in wanted:
                self._draining.append(member)
                self._in_background(self._drain(member))
        self._members = [known[url] if url in known else self._newcomer(url) for url in wanted]

    def _newcomer(self, url: str) -> Member:
        member = self._member(url)
        member.leave_out("it has not answered yet", 0.0, 0.0)
        return member

    async def _drain(self, member: Member) -> None:
        """Let what runs there come to its end, or to the deadline of those requests."""
        while member.in_flight:
            await asyncio.sleep(_LOOK_S)
        self._draining.remove(member)
        self._gone.add(member.client.counters)
        await member.client.close()

    async def versions(self, deadline_s: float) -> dict[str, int]:
        """The version each serving engine samples with; one that does not answer in time is left out.

        Engines that are left out are asked whether they can be taken back, so that a caller who waits for a version
        before it sends anything does not wait for ever.
        """
        self._start_due_probes()
        serving = [member for member in self._members if member.serves]
        answers = await asyncio.gather(*(self._ask_version(member, deadline_s) for member in serving))
        return {member.client.url: version for member, version in zip(serving, answers) if version is not None}

    async def _ask_version(self, member: Member, deadline_s: float) -> int | None:
        try:
            async with asyncio.timeout(deadline_s):
                member.version = await member.client.version()
                return member.version
        except EngineError as error:
            self._leave_out(member, str(error))
        except TimeoutError:
            self._leave_out(member, f"{member.client.url}: no answer to its version in {deadline_s:g} s")
        return None

    # -- requests -----------------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        options: SamplingOptions,
        *,
        rid: str | None = None,
        on_chunk: OnChunk | None = None,
        return_routed_experts: bool = False,
        min_version: int = 0,
    ) -> Generation:
        """``EngineClient.generate`` on the least loaded serving engine, and on another one if that fails.

        ``min_version``: the oldest weights that may answer, where engines of two versions serve at a time.

        Raises:
            EngineUnreachable: no engine for ``patience_s``, the last of ``attempts`` broke, or one broke after it had
                delivered tokens.
            EngineTimeout: ``deadline_s`` is over, or an engine fell silent.
            EngineError: the engine refused the request, or the last answer contradicts itself.
            RuntimeError: a defect of the pool (see the module).
        """
        way = _Way(min_version)

        def watched(chunk: Chunk) -> Any:
            way.delivered += len(chunk.output_ids)
            return None if on_chunk is None else on_chunk(chunk)

        def send(client: EngineClient) -> Coroutine[Any, Any, Generation]:
            return client.generate(
                input_ids, options, rid=rid, on_chunk=None if on_chunk is None else watched,
                return_routed_experts=return_routed_experts,
            )

        try:
            async with asyncio.timeout(self.deadline_s) as limit:
                return await self._until_answered(send, way)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EngineTimeout(
                f"generation not complete after {self.deadline_s:g} s: {way.delivered} tokens so far, tried on "
                f"{', '.join(way.tried) or 'no engine'}; in flight {self.in_flight}; left out {self.failures}"
            ) from error

    async def _until_answered(
        self, send: Callable[[EngineClient], Coroutine[Any, Any, Generation]], way: _Way
    ) -> Generation:
        while True:
            member = await self._place(way)
            way.tried.append(member.client.url)
            try:
                return await self._on(member, send(member.client))
            except EngineError as error:
                if way.delivered or len(way.tried) >= self.attempts or not _elsewhere(error):
                    raise
            finally:
                member.in_flight -= 1

    async def _on(self, member: Member, request: Coroutine[Any, Any, Generation]) -> Generation:
        """One request on one engine; how it went counts for or against the engine."""
        try:
            generation = await member.run(request)
        except (EngineUnreachable, EngineTimeout) as error:
            self._leave_out(member, str(error))
            raise
        except EngineError as error:
            if _elsewhere(error):
                member.note_failure(str(error), self.probe_s, self.longest_probe_s)
            raise
        member.failures_in_a_row = 0
        return generation

    async def _place(self, way: _Way) -> Member:
        """The engine for a request, with a place on it taken. Prefers those it was not tried on.

        First come, first served: one request at a time looks, the others queue behind it.
        """
        while True:
            member = await self._place_in_turn(way)
            if member is not None:
                return member
            await self._learn_versions()
            await asyncio.sleep(_LOOK_S)

    async def _learn_versions(self) -> None:
        now = time.monotonic()
        if now - self._asked_versions_at >= _ASK_VERSIONS_S:
            self._asked_versions_at = now
            await self.versions(self.health_deadline_s)

    async def _place_in_turn(self, way: _Way) -> Member | None:
        """None when engines serve, but none is known to be new enough: others need not wait for that."""
        async with self._queue:
            while True:
                self._start_due_probes()
                serving = [member for member in self._samplers if member.serves]
                if serving and not (serving := [m for m in serving if m.version >= way.min_version]):
                    return None
                limit = self.max_in_flight * (1 if self._router is None else max(1, len(self._members)))
                free = [member for member in serving if member.in_flight < limit]
                if free:
                    self._nobody_since = None
                    chosen = min(free, key=lambda member: (way.tried.count(member.client.url), member.in_flight))
                    chosen.in_flight += 1
                    return chosen
                if not serving:
                    await self._refuse_if_hopeless()
                await asyncio.sleep(_LOOK_S)

    async def _refuse_if_hopeless(self) -> None:
        now = time.monotonic()
        self._nobody_since = self._nobody_since or now
        if now - self._nobody_since < self.patience_s:
            return
        if now - self._asked_all_at >= self.probe_s:
            self._asked_all_at = now
            await self.probe()
        if not any(member.serves for member in self._samplers):
            raise EngineUnreachable(self._nobody())

    def _nobody(self) -> str:
        causes = "; ".join(member.last_failure or member.client.url for member in self._samplers)
        waited = f" for {self.patience_s:g} s" if self.patience_s else ""
        return f"no engine of {len(self._samplers)} can be reached{waited}: {causes or 'the list of engines is empty'}"

    # -- health -------------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Ask every serving engine for its health; one that does not answer in ``health_deadline_s`` is left out, and
        its running requests go elsewhere. Paused engines answer."""
        await asyncio.gather(*(self._check(member) for member in self._members if member.serves))

    async def probe(self) -> None:
        """Ask every engine that is left out whether it can be taken back."""
        await asyncio.gather(*(self._probe(m) for m in self._watched if not m.serves and not m.probing))

    async def _check(self, member: Member) -> None:
        try:
            await self._health(member)
        except EngineError as error:
            self._leave_out(member, str(error))
            member.give_up_requests(error.text)

    def _start_due_probes(self) -> None:
        if self._defect is not None:
            raise RuntimeError(f"the pool of engines failed in the background: {self._defect!r}") from self._defect
        now = time.monotonic()
        for member in self._watched:
            if member.probe_at is not None and now >= member.probe_at and not member.probing:
                self._in_background(self._probe(member))

    async def _probe(self, member: Member) -> None:
        """Take an engine back if it answers and holds the required version."""
        member.probing = True
        try:
            await self._health(member)
            if member is not self._router:
                await self._require_version(member)
        except EngineError as error:
            self._leave_out(member, str(error))
        else:
            member.take_back()
        finally:
            member.probing = False

    async def _require_version(self, member: Member) -> None:
        member.version = await member.client.version()
        if member.version < self.required_version:
            raise EngineError(f"holds version {member.version}, but {self.required_version} is required",
                              url=member.client.url)

    async def _health(self, member: Member) -> None:
        try:
            async with asyncio.timeout(self.health_deadline_s):
                await member.client.check()
        except TimeoutError as error:
            text = f"no answer to a health check in {self.health_deadline_s:g} s"
            raise EngineTimeout(text, url=member.client.url) from error

    def _leave_out(self, member: Member, cause: str) -> None:
        member.leave_out(cause, self.probe_s, self.longest_probe_s)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("engine pool: %s", error, exc_info=error)
            self._defect = self._defect or error


def _elsewhere(error: EngineError) -> bool:
    """Whether another engine may do better: not when this one refused the request itself."""
    return error.status is None or not 400 <= error.status < 500 or error.status in _NOT_NOW
