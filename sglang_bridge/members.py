"""One engine of a pool: how it is doing, and the requests it has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from sglang_bridge.client import EngineClient
from sglang_bridge.errors import EngineUnreachable
from sglang_bridge.protocol import Generation

# Answers that contradict themselves, or HTTP 5xx, before an engine that can be reached is left out for it.
_TOLERATED = 2


@dataclass(slots=True, eq=False)
class Member:
    """State of one engine in a pool.

    version: the least that it is known to sample with; 0 when it has not said. probe_at: monotonic time from which it
    may be asked for its health again; None while it serves.
    failures_in_a_row: since an answer was good.
    """

    client: EngineClient
    in_flight: int = 0
    version: int = 0
    last_failure: str = ""
    failures_in_a_row: int = 0
    probe_at: float | None = None
    probing: bool = False
    _running: set[asyncio.Task[Generation]] = field(default_factory=set)
    _given_up: dict[asyncio.Task[Generation], str] = field(default_factory=dict)

    @property
    def serves(self) -> bool:
        """Whether it takes requests now."""
        return self.probe_at is None

    def leave_out(self, cause: str, pause_s: float, longest_s: float) -> None:
        """No requests for a while: ``pause_s`` after the first failure, twice as long after each further one."""
        self.failures_in_a_row += 1
        self.last_failure = cause
        doubled = pause_s * 2.0 ** min(self.failures_in_a_row - 1, 16)
        self.probe_at = time.monotonic() + min(doubled, max(pause_s, longest_s))

    def note_failure(self, cause: str, pause_s: float, longest_s: float) -> None:
        """A bad answer from an engine that can be reached: left out (quarantined) once it gives several in a row."""
        if self.failures_in_a_row >= _TOLERATED:
            self.leave_out(cause, pause_s, longest_s)
        else:
            self.failures_in_a_row += 1
            self.last_failure = cause

    def take_back(self) -> None:
        """It serves again; failures still count until an answer was good."""
        self.probe_at = None

    async def run(self, request: Coroutine[Any, Any, Generation]) -> Generation:
        """Await a request, unless the engine is given up meanwhile.

        Raises:
            EngineUnreachable: it was.
        """
        task = asyncio.ensure_future(request)
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task not in self._given_up or (caller is not None and caller.cancelling()):
                raise
            raise EngineUnreachable(self._given_up[task], url=self.client.url) from None
        finally:
            self._running.discard(task)
            self._given_up.pop(task, None)

    def give_up_requests(self, cause: str) -> None:
        """End every running request: it does not answer, so they would wait in vain."""
        for task in self._running:
            self._given_up[task] = cause
            task.cancel()
