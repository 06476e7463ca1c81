"""``EnginePool``: one face for several engines.

Invariants
- A request goes to the healthy engine with the fewest requests of this pool in flight.
- An engine that cannot be reached is left out until a health check succeeds; the request that found out goes to
  another engine, if none of its tokens were delivered yet. With no healthy engine left the error lists them all.
- Control (pause, version, weights) is not the pool's: it goes to each engine, through the publisher.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from sglang_bridge.client import ClientCounters, EngineClient, OnChunk
from sglang_bridge.errors import EngineError, EngineUnreachable
from sglang_bridge.protocol import Chunk, Generation, SamplingOptions


@dataclass(slots=True)
class _Member:
    client: EngineClient
    in_flight: int = 0
    last_failure: str = ""
    out_since: float | None = None  # monotonic time it was left out, None while healthy
    probing: bool = False


class EnginePool:
    """Spreads generations over the engines at ``urls``; further keyword arguments go to each ``EngineClient``.

    ``probe_s``: an engine left out is asked for its health again when a request comes at least this long after.
    """

    def __init__(self, urls: Sequence[str], *, probe_s: float = 5.0, **client_options: Any) -> None:
        if not urls:
            raise ValueError("a pool needs at least one engine url")
        self.probe_s = probe_s
        self._members = [_Member(EngineClient(url, **client_options)) for url in urls]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections to every engine."""
        for member in self._members:
            await member.client.close()

    @property
    def clients(self) -> list[EngineClient]:
        """The client of each engine, in the order of ``urls``."""
        return [member.client for member in self._members]

    @property
    def healthy_urls(self) -> list[str]:
        """Engines that take requests now."""
        return [member.client.url for member in self._members if member.out_since is None]

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests of this pool running on each engine."""
        return {member.client.url: member.in_flight for member in self._members}

    @property
    def counters(self) -> ClientCounters:
        """Sum of the counters of all clients."""
        total = ClientCounters()
        for member in self._members:
            for name in ClientCounters.__slots__:
                setattr(total, name, getattr(total, name) + getattr(member.client.counters, name))
        return total

    async def generate(
        self,
        input_ids: Sequence[int],
        options: SamplingOptions,
        *,
        rid: str | None = None,
        on_chunk: OnChunk | None = None,
        return_routed_experts: bool = False,
    ) -> Generation:
        """``EngineClient.generate`` on the least loaded healthy engine.

        Raises:
            EngineUnreachable: every engine is out, or one broke after it had delivered tokens.
        """
        delivered = False

        def watched(chunk: Chunk) -> Any:
            nonlocal delivered
            delivered = True
            return None if on_chunk is None else on_chunk(chunk)

        while True:
            member = await self._pick()
            member.in_flight += 1
            try:
                return await member.client.generate(
                    input_ids, options, rid=rid, on_chunk=watched if on_chunk is not None else None,
                    return_routed_experts=return_routed_experts,
                )
            except EngineUnreachable as error:
                self._leave_out(member, str(error))
                if delivered:
                    raise
            finally:
                member.in_flight -= 1

    async def _pick(self) -> _Member:
        await self._probe_due()
        healthy = [member for member in self._members if member.out_since is None]
        if not healthy:
            await asyncio.gather(*(self._probe(member) for member in self._members))
            healthy = [member for member in self._members if member.out_since is None]
        if not healthy:
            causes = "; ".join(member.last_failure or member.client.url for member in self._members)
            raise EngineUnreachable(f"no engine of {len(self._members)} can be reached: {causes}")
        return min(healthy, key=lambda member: member.in_flight)

    async def _probe_due(self) -> None:
        now = time.monotonic()
        due = [member for member in self._members
               if member.out_since is not None and now - member.out_since >= self.probe_s and not member.probing]
        await asyncio.gather(*(self._probe(member) for member in due))

    async def _probe(self, member: _Member) -> None:
        member.probing = True
        try:
            await member.client.info()
        except EngineError as error:
            self._leave_out(member, str(error))
        else:
            member.out_since = None
        finally:
            member.probing = False

    def _leave_out(self, member: _Member, cause: str) -> None:
        member.out_since = time.monotonic()
        member.last_failure = cause
