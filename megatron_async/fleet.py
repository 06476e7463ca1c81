"""The engines of one machine: started, watched, started again when they end, and stopped.

Invariants
- An engine that dies, freezes or is reported as no good is started again, on the port it had where that was chosen and
  on a free one otherwise, after a pause that doubles with each failure; after `engines.max_restarts` failures within
  `engines.restart_window_s` it is given up (quarantined). Every such event has its reason, with the end of its log.
- What answers is another engine than before (`incarnation`): whoever uses it asks for its version first.
- `tick` never waits for an engine to start.
- Whatever ends the block, no server survives it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from megatron_async.config.checks import is_local
from megatron_async.config.placement import EngineSlot, Node
from megatron_async.config.schema import RunConfig
from megatron_async.engine_key import ensure_key
from megatron_async.observe import RunFiles
from megatron_async.restarting import RestartBudget
from megatron_async.roster import LATE, Engine
from megatron_async.supervise import StopRequested, describe_exit, on_second_signal
from sglang_bridge import EngineClient, EngineError, EngineServer, EngineStartError, ServerOptions
from sglang_bridge.addresses import is_loopback
from sglang_bridge.event_loop import BackgroundLoop

Say = Callable[[str], None]

_STOP_S = 3.0
_HEALTH_EVERY_S = 5.0

RUNNING, STARTING, PAUSING, GIVEN_UP = "running", "starting", "waits to be started", "given up"


@dataclass(slots=True)
class _Slot:
    """One engine over all its incarnations. until: monotonic time at which the state ends at the latest."""

    place: EngineSlot
    server: EngineServer
    budget: RestartBudget
    state: str = STARTING
    incarnation: int = 0
    until: float = 0.0
    last_failure: str = ""
    restarts: int = 0
    heard_of: float = 0.0
    asked: Future[Any] | None = None
    client: EngineClient | None = None

    @property
    def name(self) -> str:
        return f"{self.place.index}.{self.incarnation}"


class Fleet:
    """The engines of `node`, listening on `host`; as a block, all of them answer at its beginning.

    options: of the server on given devices. api_key: asked of every client. say: where to tell what happens. clock:
    monotonic seconds. server: makes one (tests put something cheaper there).
    """

    def __init__(
        self,
        config: RunConfig,
        files: RunFiles,
        node: Node,
        host: str,
        options: Callable[[tuple[int, ...]], ServerOptions],
        say: Say,
        *,
        api_key: str = "",
        clock: Callable[[], float] = time.monotonic,
        server: Callable[..., EngineServer] = EngineServer,
    ) -> None:
        self._config, self._files, self._node, self._host = config, files, node, host
        self._options, self._say, self._key, self._clock, self._make = options, say, api_key, clock, server
        self._slots: list[_Slot] = []
        self._loop = BackgroundLoop("engine-health") if node.engines else None
        self.model_path, self.version = config.model.path, 0
        """What an engine that is started again begins with."""

    def __enter__(self) -> Self:
        try:
            if self._node.engines:
                self._say(f"starting {len(self._node.engines)} engine(s), which takes up to a minute or two")
            for place in self._node.engines:
                slot = _Slot(place, self._server(place), RestartBudget(self._config.engines))
                self._slots.append(slot)
                slot.server.start()
            for slot in self._slots:
                slot.server.wait_ready(self._config.engines.start_deadline_s)
                self._runs(slot)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StopRequested) and error.at_once:
            self._kill()
        self.close()

    def close(self) -> None:
        """Stop every server: all are told first, then waited for."""
        with on_second_signal(self._kill):
            for slot in self._slots:
                slot.server.interrupt()
            for slot in self._slots:
                slot.server.stop(_STOP_S)
        if self._loop is not None:
            for slot in self._slots:
                if slot.client is not None:
                    self._loop.run(slot.client.close())
            self._loop.close()
            self._loop = None

    def _kill(self) -> None:
        for slot in self._slots:
            slot.server.kill()

    # ------------------------------------------------------------------ what there is

    @property
    def engines(self) -> list[Engine]:
        """Those that answer. Their state is for whoever knows the published version to decide."""
        return [
            Engine(slot.place.index, slot.server.url, slot.incarnation, LATE)
            for slot in self._slots
            if slot.state == RUNNING
        ]

    @property
    def hopeful(self) -> int:
        """Engines that answer or are being started."""
        return sum(slot.state != GIVEN_UP for slot in self._slots)

    @property
    def restarts(self) -> int:
        """Engines started again so far."""
        return sum(slot.restarts for slot in self._slots)

    def describe(self) -> list[str]:
        """One line for each engine: what it does, how often it was started again, why last."""
        return [
            f"engine {slot.place.index}: {slot.state}"
            + (f", started again {slot.restarts} time(s)" if slot.restarts else "")
            + (f"; last failure: {slot.last_failure.splitlines()[0]}" if slot.last_failure else "")
            for slot in self._slots
        ]

    # ------------------------------------------------------------------ watching

    def tick(self) -> None:
        """Look after every engine; call it about twice a second."""
        for slot in self._slots:
            if slot.state == RUNNING:
                self._look_after(slot)
            elif slot.state == STARTING:
                self._look_at_start(slot)
            elif slot.state == PAUSING and self._clock() >= slot.until:
                self._start_again(slot)

    def restart(self, name: str, reason: str) -> None:
        """Start an engine (by `Engine.name`) again although it seems to be alive; one that is gone already is left."""
        for slot in self._slots:
            if slot.name == name and slot.state == RUNNING:
                slot.server.stop(0.0)
                self._failed(slot, reason)

    def _look_after(self, slot: _Slot) -> None:
        if not slot.server.alive():
            self._failed(slot, f"{describe_exit(slot.server.exit_code)}; its log ends:\n{slot.server.log_tail()}")
            return
        now = self._clock()
        if slot.asked is not None and slot.asked.done():
            if slot.asked.exception() is None:
                slot.heard_of = now
            elif not isinstance(slot.asked.exception(), EngineError):
                slot.asked.result()  # a defect of this program
            slot.asked = None
        silent, deadline = now - slot.heard_of, self._config.engines.health_deadline_s
        if silent > deadline + self._config.publish.deadline_s:
            slot.server.stop(0.0)
            text = f"gave no answer for {silent:.0f} s (engines.health_deadline_s + publish.deadline_s) and was killed"
            self._failed(slot, text)
        elif slot.asked is None and now >= slot.until:
            slot.until = now + min(_HEALTH_EVERY_S, deadline / 4)
            assert self._loop is not None and slot.client is not None
            slot.asked = self._loop.submit(slot.client.info())

    def _look_at_start(self, slot: _Slot) -> None:
        if not slot.server.alive():
            code = describe_exit(slot.server.exit_code)
            self._failed(slot, f"{code} while starting; its log ends:\n{slot.server.log_tail()}")
        elif slot.server.answers():
            self._runs(slot)
            self._say(f"engine {slot.place.index} answers again at {slot.server.url}")
        elif self._clock() > slot.until:
            slot.server.stop(0.0)
            limit = f"{self._config.engines.start_deadline_s:g} s (engines.start_deadline_s)"
            self._failed(slot, f"was not ready after {limit}; its log ends:\n{slot.server.log_tail()}")

    def _runs(self, slot: _Slot) -> None:
        assert self._loop is not None
        if slot.client is not None:
            self._loop.run(slot.client.close())
        deadline = self._config.engines.health_deadline_s
        slot.client = EngineClient(slot.server.url, api_key=self._key, control_deadline_s=deadline, retries=0)
        slot.state, slot.asked, slot.heard_of, slot.until = RUNNING, None, self._clock(), self._clock()

    def _failed(self, slot: _Slot, reason: str) -> None:
        """Count a failure, and decide whether there is another try."""
        slot.last_failure = reason
        slot.server.stop(0.0)  # what it left behind
        pause = slot.budget.failed(self._clock())
        if pause is None:
            slot.state = GIVEN_UP
        else:
            slot.state, slot.until = PAUSING, self._clock() + pause
        index, what = slot.place.index, slot.budget.describe(pause)
        self._say(f"engine {index} at {slot.server.url} {reason}\nengine {index}: {what}")

    def _start_again(self, slot: _Slot) -> None:
        slot.restarts += 1
        slot.incarnation += 1
        slot.server = self._server(slot.place)
        slot.state, slot.until = STARTING, self._clock() + self._config.engines.start_deadline_s
        try:
            slot.server.start()
        except EngineStartError as error:
            self._failed(slot, f"could not be started: {error}")

    def _server(self, place: EngineSlot) -> EngineServer:
        base = self._config.engines.base_port
        first = min(engine.index for engine in self._node.engines)
        return self._make(
            self.model_path,
            self._host,
            base + place.index - first if base else 0,
            log_path=self._files.logs / f"engine_{place.index}.log",
            options=replace(self._options(place.devices), weight_version=self.version),
        )


def fleet(config: RunConfig, files: RunFiles, node: Node, host: str, say: Say) -> Fleet:
    """The engines that a machine holds, listening on `host` (or `engines.host`, if that is an address of a network).
    They ask for the run's key where others could reach them."""
    listen = host if is_local(config.engines.host) else config.engines.host
    key = "" if is_loopback(listen) else ensure_key(files)
    return Fleet(config, files, node, listen, lambda devices: server_options(config, devices, key), say, api_key=key)


def server_options(config: RunConfig, devices: tuple[int, ...] = (), api_key: str = "") -> ServerOptions:
    """SGLang's options for one engine of this run. devices: the accelerators it may use; empty: all it finds."""
    return ServerOptions(
        environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {},
        dtype=config.model.dtype,
        tensor_parallel_size=config.engines.tensor_parallel_size,
        max_total_tokens=config.engines.max_total_tokens,
        mem_fraction_static=config.engines.mem_fraction_static,
        routed_experts=config.engines.routed_experts,
        extra_args=config.engines.extra_args,
        api_key=api_key,
    )
