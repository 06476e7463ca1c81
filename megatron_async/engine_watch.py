"""Who serves: the first machine's view of all engines of a run, which it writes down for everybody (see `roster`).

Invariants
- An engine serves once it is known to hold the version that was last published; one that was started again is `late`
  until then, and the trainer publishes to it.
- What the trainer reports as no good is started again; what it wants drained serves nobody meanwhile.
- With fewer engines than `engines.quorum` that answer or are being started, the run ends with the reasons.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_async.bank import Bank
from megatron_async.bank.requests import DRAIN, PUBLISHED
from megatron_async.config.schema import RunConfig
from megatron_async.fleet import Fleet
from megatron_async.machines import Others
from megatron_async.roster import DRAINING, LATE, SERVING, Engine, failed_key, write_roster
from megatron_async.router import Router
from megatron_async.supervise import PartFailed
from sglang_bridge import EngineClient, EngineError
from sglang_bridge.event_loop import BackgroundLoop

_ANSWER_S = 10.0
_POLL_S = 0.5


class EngineWatch:
    """bank: read for what was published and reported. others: engines of other machines. router: in front of the
    engines, told which of them serve, and looked after too. As a block, it closes its connections."""

    def __init__(
        self,
        config: RunConfig,
        fleet: Fleet,
        others: Others,
        bank: Bank,
        say: Callable[[str], None],
        *,
        api_key: str = "",
        router: Router | None = None,
    ) -> None:
        self._config, self._fleet, self._others, self._bank, self._say = config, fleet, others, bank, say
        self._key, self._router = api_key, router
        self._serving: set[str] = set()
        self._written: list[Engine] | None = None
        self._unwritten = ""
        self._known: set[str] = set()
        self._asked: dict[str, Future[int]] = {}
        self._training_over = False
        self._loop = BackgroundLoop("engine-watch")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.close()

    @property
    def urls(self) -> list[str]:
        """Addresses of the serving engines."""
        return [engine.url for engine in self._written or [] if engine.serves]

    def begin(self) -> None:
        """All engines were started for this run and none is behind another: all of them serve."""
        found = self._found()
        for engine in found:
            self._reported(engine)
        self._serving = {engine.name for engine in found}
        self._write()

    def tick(self) -> None:
        """Look after the engines; call it about twice a second.

        Raises:
            PartFailed: too few of them are left, or the router failed too often.
        """
        self._fleet.tick()
        if self._router is not None:
            self._router.tick()
        self._others.check()
        for engine in self._found():
            if reason := self._reported(engine):
                self._restart(engine, f"was reported by the trainer: {reason}")
            elif engine.name not in self._serving:
                self._ask(engine)
        self._write()
        left = self._fleet.hopeful + self._others.hopeful()
        if left < self._config.engines.quorum:
            raise PartFailed(
                f"{left} of {self._config.engines.count} engines are left, engines.quorum is "
                f"{self._config.engines.quorum}:\n" + "\n".join([*self._fleet.describe(), *self._others.describe()])
            )

    def wait(self) -> list[str]:
        """Addresses of the serving engines, once there is one.

        Raises PartFailed when none came within `engines.start_deadline_s`, or too few are left.
        """
        limit = time.monotonic() + self._config.engines.start_deadline_s
        while not self.urls:
            self.tick()
            if time.monotonic() > limit:
                lines = [*self._fleet.describe(), *self._others.describe()]
                raise PartFailed("no engine serves (engines.start_deadline_s):\n" + "\n".join(lines))
            time.sleep(_POLL_S)
        return self.urls

    def training_ended(self, checkpoint: Path) -> None:
        """From now on nobody publishes: an engine that is started again begins with the final weights."""
        self._training_over = True
        self._fleet.model_path, self._fleet.version = str(checkpoint), self._published()
        self._others.begin_with(str(checkpoint), self._published())

    def _published(self) -> int:
        return int(self._bank.get_state(PUBLISHED) or 0)

    def _found(self) -> list[Engine]:
        return sorted([*self._fleet.engines, *self._others.engines()], key=lambda engine: engine.index)

    def _reported(self, engine: Engine) -> str:
        """Why the trainer says that it is no good, once; empty while it says nothing.

        What is there before the trainer can know the engine was said of another one of this name, in an earlier run:
        it had ended already when it was reported, so nobody heard of it.
        """
        key = failed_key(engine.name)
        reason = self._bank.get_state(key) or ""
        if reason:
            self._bank.set_state(key, "")
        known = engine.name in self._known
        self._known.add(engine.name)
        return reason if known else ""

    def _restart(self, engine: Engine, reason: str) -> None:
        self._serving.discard(engine.name)
        self._fleet.restart(engine.name, reason)
        self._others.restart(engine.name, reason)

    def _ask(self, engine: Engine) -> None:
        """Ask a late engine for its version, and let it serve when that is the published one or newer."""
        asked = self._asked.get(engine.name)
        if asked is None:
            self._asked[engine.name] = self._loop.submit(_version(engine.url, self._key))
        elif asked.done():
            del self._asked[engine.name]
            if asked.exception() is not None:
                if not isinstance(asked.exception(), EngineError):
                    asked.result()  # a defect of this program
                return
            version = asked.result()
            if version >= self._published():
                self._serving.add(engine.name)
                self._say(f"engine {engine.index} holds version {version} and serves")
            elif self._training_over:
                self._restart(engine, f"holds version {version}, and the training that would update it is over")

    def _write(self) -> None:
        found = self._found()
        drained = (self._bank.get_state(DRAIN) or "").split()
        now = [replace(engine, state=self._state(engine, drained)) for engine in found]
        if now != self._written and self._wrote(now):
            self._written = now
            self._serving &= {engine.name for engine in now}
        if self._router is not None:
            self._router.follow(self.urls)

    def _wrote(self, engines: list[Engine]) -> bool:
        """Whether the roster could be written; where the disk is full, the next look tries again."""
        try:
            write_roster(self._config.run_path, engines, self._router.url if self._router is not None else "")
        except OSError as error:
            if str(error) != self._unwritten:
                self._say(f"who serves cannot be written down ({error}); it is tried again")
            self._unwritten = str(error)
            return False
        self._unwritten = ""
        return True

    def _state(self, engine: Engine, drained: Sequence[str]) -> str:
        if engine.name not in self._serving:
            return LATE
        return DRAINING if engine.name in drained else SERVING


async def _version(url: str, key: str) -> int:
    async with EngineClient(url, api_key=key, control_deadline_s=_ANSWER_S, retries=0) as client:
        return await client.version()
