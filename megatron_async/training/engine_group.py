"""The engines as rank 0 publishes to them: they may die, and come back without weights.

Invariants
- An engine that fails while it is spoken to is left out, and reported to the launcher, which starts it again; the
  others go on. An error that names no engine is nobody's fault, and raised.
- What was published is written into the bank only once every engine that was not left out holds it: an engine that
  was started again serves once it holds that version or a newer one.
- With `publish.pause_mode: drain`, engines are published to in turn: those whose turn it is get no new requests and end
  what runs on them first, for `publish.drain_s` at the longest; what still runs then is retracted like in that mode.
- An engine is late from the moment it answers until something was published to it. Before the first publication of a
  run none is: all hold the starting weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from megatron_async.bank import Bank
from megatron_async.bank.requests import DRAIN, PUBLISHED
from megatron_async.config.schema import PublishConfig
from megatron_async.engine_key import read_key
from megatron_async.roster import Engine, failed_key, read_roster
from sglang_bridge import Publisher, PublishError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_S = 0.5
_IDLE_S, _IDLE_LOOK_S = 1.0, 0.1
"""An engine is drained when it has had no request for so long: whoever sends may hear of it a moment late."""


class EngineGroup:
    """The engines of the run in `run_path`. `publisher` speaks to all that are there and were not left out."""

    def __init__(self, config: PublishConfig, bank: Bank, run_path: Path) -> None:
        self._config, self._bank, self._run_path = config, bank, run_path
        self._left_out: set[str] = set()
        self._holding: set[str] = set()
        self._published: int | None = None
        self._looked_at = 0.0
        self._late: list[Engine] = []
        self._drained_for: int | None = None
        bank.set_state(DRAIN, "")  # an earlier trainer may have been killed over it
        self._targets = self._present()
        self.publisher = self._publisher([engine.url for engine in self._targets])

    def _publisher(self, urls: list[str]) -> Publisher:
        config = self._config
        return Publisher(
            urls,
            transport=config.transport,
            pause_mode="retract" if config.pause_mode == "drain" else config.pause_mode,
            bucket_bytes=config.bucket_bytes,
            deadline_s=config.deadline_s,
            api_key=read_key(self._run_path),
        )

    def _present(self) -> list[Engine]:
        return [engine for engine in read_roster(self._run_path) if engine.name not in self._left_out]

    # ------------------------------------------------------------------ all engines

    def refresh(self) -> int:
        """Speak to the engines that are there now; how many that are."""
        self._targets = self._present()
        self.publisher.follow([engine.url for engine in self._targets])
        return len(self._targets)

    def connect(self) -> None:
        """Reach every engine, before the first publication needs it."""
        self.with_those_left(self.publisher.connect)

    def published(self, version: int) -> None:
        """All that are there hold `version`."""
        self._published = version
        self._holding = {engine.name for engine in self._targets}
        self._bank.set_state(PUBLISHED, str(version))

    def leave_out(self, error: PublishError) -> None:
        """Leave out the engines that an error blames, and report them; raises it when it blames none."""
        blamed = [engine for engine in self._targets + self._late if engine.url in error.urls]
        if not blamed:
            raise error
        for engine in blamed:
            logger.warning("engine %d at %s is left out: %s", engine.index, engine.url, error)
            self._left_out.add(engine.name)
            self._bank.set_state(failed_key(engine.name), str(error))
        self.refresh()

    def with_those_left(self, act: Callable[[], T]) -> T | None:
        """The result of `act` on the engines that can do it; None when none is left."""
        while self.refresh():
            try:
                return act()
            except PublishError as error:
                self.leave_out(error)
        return None

    def hold(self) -> float:
        """As `Publisher.hold`."""
        stopped_at = self.with_those_left(self.publisher.hold)
        return time.time() if stopped_at is None else stopped_at

    def release(self) -> None:
        """As `Publisher.release`."""
        self.with_those_left(self.publisher.release)

    def close(self) -> None:
        self.publisher.close()

    # ------------------------------------------------------------------ late ones

    def anyone_late(self) -> bool:
        """Whether an engine waits for weights; looks twice a second at most."""
        if self._published is None or time.monotonic() - self._looked_at < _LOOK_S:
            return False
        self._looked_at = time.monotonic()
        self._late = [engine for engine in self._present() if engine.name not in self._holding]
        return bool(self._late)

    def to_late_ones(self) -> Publisher:
        """A publisher to the engines that `anyone_late` or `drain_next` found, and to no others. Close it."""
        return self._publisher([engine.url for engine in self._late])

    def caught_up(self) -> None:
        """The late ones hold what was published to them."""
        self._holding |= {engine.name for engine in self._late}
        logger.info("engine(s) %s caught up", ", ".join(str(engine.index) for engine in self._late))
        self._late = []

    # ------------------------------------------------------------------ drained ones

    def drain_next(self, version: int) -> int:
        """Let the next engines that do not hold `version` fall idle; how many those are, 0 when all hold it.

        They serve again at the next call. Those that do not answer are left out.
        """
        if self._drained_for != version:
            self._drained_for, self._holding = version, set()
        while True:
            self._targets = self._present()
            waiting = [engine for engine in self._targets if engine.name not in self._holding]
            self._late = waiting[: self._config.drain_at_once]
            self._bank.set_state(DRAIN, " ".join(engine.name for engine in self._late))
            if not self._late:
                return 0
            try:
                with closing(self.to_late_ones()) as publisher:
                    self._until_idle(publisher)
            except PublishError as error:
                self.leave_out(error)
            else:
                return len(self._late)

    def _until_idle(self, publisher: Publisher) -> None:
        limit = time.monotonic() + self._config.drain_s
        busy_at, running = time.monotonic(), 0
        while (now := time.monotonic()) < limit and now - busy_at < _IDLE_S:
            if running := publisher.running():
                busy_at = now
            time.sleep(_IDLE_LOOK_S)
        if running:
            names = ", ".join(str(engine.index) for engine in self._late)
            logger.info("engine(s) %s: %d requests still run after %g s (publish.drain_s) and are retracted", names,
                        running, self._config.drain_s)  # fmt: skip
