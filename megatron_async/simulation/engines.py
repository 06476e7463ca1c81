"""Engines that share their speed among the requests they run.

Invariants: all running requests of an engine make the same progress, so they are kept ordered by the progress at which
they end; a request's tokens are attributed to the version that the engine held while they were sampled.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_async.simulation.events import Clock, Event
from megatron_async.simulation.scenario import EngineModel


@dataclass(slots=True)
class Request:
    """One turn on an engine. Progress is counted in decoding steps; those beyond `actions` are prefill.

    cached, context: tokens before it whose KV the engine holds already, and those it must prefill. spans: (version,
    tokens) of what was sampled so far.
    """

    cached: int
    context: int
    actions: int
    done: Callable[[list[tuple[int, float]]], None]
    end: float = 0.0
    sampled_from: float = 0.0
    spans: list[tuple[int, float]] = field(default_factory=list)


class Engine:
    """One engine. speed: 1 at rest beside it, lower while the trainer shares its processors, 0 while paused."""

    def __init__(self, clock: Clock, model: EngineModel, on_busy: Callable[[], None]) -> None:
        self._clock, self._model, self._on_busy = clock, model, on_busy
        self._requests: list[tuple[float, int, Request]] = []
        self._order = itertools.count()
        self._progress, self._since, self._speed = 0.0, clock.now, 1.0
        self._next: Event | None = None
        self.version = 0
        self.busy_seconds = 0.0
        self.running_seconds = 0.0
        self.paused_seconds = 0.0

    @property
    def running(self) -> int:
        return len(self._requests)

    @property
    def computes(self) -> bool:
        """Whether it takes processor time now."""
        return bool(self._requests) and self._speed > 0

    def submit(self, request: Request) -> None:
        """Start a request; `done(spans)` is called at its end."""
        self._advance()
        prefill = self._model.prefill * request.context
        request.sampled_from = self._progress + prefill
        request.end = request.sampled_from + request.actions
        self._push(request)
        self._changed()

    def set_speed(self, speed: float) -> None:
        """speed >= 0."""
        if speed != self._speed:
            self._advance()
            self._speed = speed
            self._changed()

    def set_version(self, version: int, *, retract: bool) -> None:
        """New weights. retract: running requests prefill all their tokens again; otherwise they keep their cache."""
        self._advance()
        requests = [request for _, _, request in self._requests]
        self._requests.clear()
        for request in requests:
            self._cut_span(request)
            if retract:
                sampled = sum(tokens for _, tokens in request.spans)
                again = self._model.prefill * (request.cached + request.context + sampled)
                request.end += again
                request.sampled_from = max(request.sampled_from, self._progress) + again
            self._push(request)
        self.version = version
        self._changed()

    def settle(self) -> None:
        """Bring the counters up to now."""
        self._advance()

    def _push(self, request: Request) -> None:
        heapq.heappush(self._requests, (request.end, next(self._order), request))

    def _cut_span(self, request: Request) -> None:
        """Attribute what was sampled since the last cut to the version that is still held."""
        sampled = min(self._progress, request.end) - request.sampled_from
        if sampled > 0:
            request.spans.append((self.version, sampled))
            request.sampled_from += sampled

    def _advance(self) -> None:
        seconds = self._clock.now - self._since
        self._since = self._clock.now
        if not self._requests or seconds <= 0:
            return
        if self._speed == 0:
            self.paused_seconds += seconds
            return
        running = len(self._requests)
        self.busy_seconds += seconds
        self.running_seconds += seconds * running
        self._progress += seconds * self._speed / self._model.step_seconds(running)

    def _changed(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self.computes:
            left = max(0.0, self._requests[0][0] - self._progress)
            seconds = left * self._model.step_seconds(self.running) / self._speed
            self._next = self._clock.after(seconds, self._finish_first)
        self._on_busy()

    def _finish_first(self) -> None:
        self._advance()
        end, _, request = heapq.heappop(self._requests)
        self._progress = max(self._progress, end)  # rounding must not leave a request unfinished
        self._cut_span(request)
        self._changed()
        request.done(request.spans)
