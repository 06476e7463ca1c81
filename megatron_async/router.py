"""sglang-router as a part of a run: started on this machine, given the engines that serve, watched.

Invariants: it listens on loopback alone, and on the same port as long as the run lasts; an engine is in its list only
while the roster calls it serving; one that dies or falls silent is started again with its list, under the bound that
holds for an engine (`engines.max_restarts`), and the run ends with the reason when that is used up. Requests that were
on their way through it are the rollout's to send again. `tick` never waits for it to start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megatron_async.config.schema import RunConfig
from megatron_async.engine_key import read_key
from megatron_async.observe import RunFiles
from megatron_async.restarting import RestartBudget
from megatron_async.supervise import Part, PartFailed, log_tail, stop_all, supervised
from sglang_bridge import EngineError
from sglang_bridge.router import RouterControl, router_command
from sglang_bridge.server import claim_port

_POLL_S = 0.2
_AGAIN_S = 5.0
_HOST = "127.0.0.1"
_RUNNING, _STARTING, _PAUSING = "running", "starting", "waits to be started"


class Router:
    """The router of a run, which has been started and answers. url: its address. say: where to tell what happens."""

    def __init__(self, part: Part, control: RouterControl, config: RunConfig, say: Callable[[str], None]) -> None:
        self._part, self._control, self._config, self._say = part, control, config.engines, say
        self._publish_s = config.publish.deadline_s
        self._budget = RestartBudget(config.engines)
        self._state, self._until = _RUNNING, 0.0
        self._wanted: list[str] = []
        self._told: tuple[list[str], float] | None = None
        self._heard_of = time.monotonic()
        self.url = control.url

    def follow(self, urls: Sequence[str]) -> None:
        """Send requests to these engines. Repeated now and then: the router only queues what it is asked."""
        self._wanted = list(urls)
        if self._state != _RUNNING or self._part.poll() is not None:
            return
        now = time.monotonic()
        if self._told is not None and self._told[0] == self._wanted and now - self._told[1] < _AGAIN_S:
            return
        try:
            has_them = self._control.set_workers(urls)
        except EngineError as error:
            self._without_list(self._config.health_deadline_s, "engines.health_deadline_s", str(error))
            return
        self._told = self._wanted, now
        if has_them:
            self._heard_of = now
        else:  # it adds an engine once that answers, which one that loads weights need not
            limit_s = self._config.health_deadline_s + self._publish_s
            self._without_list(limit_s, "engines.health_deadline_s + publish.deadline_s", "it answers and does nothing")

    def tick(self) -> None:
        """Look after it; call it about twice a second. Raises PartFailed when it failed too often."""
        if self._state == _PAUSING:
            if time.monotonic() >= self._until:
                self._part.start()
                self._state, self._until = _STARTING, time.monotonic() + self._config.start_deadline_s
        elif self._part.poll() is not None:
            self._failed(str(self._part.failure()))
        elif self._state == _STARTING:
            self._look_at_start()

    def _look_at_start(self) -> None:
        if self._control.answers():
            self._state, self._told, self._heard_of = _RUNNING, None, time.monotonic()
            self._say(f"router answers again at {self.url}")
            self.follow(self._wanted)
        elif time.monotonic() > self._until:
            self._failed(_not_ready(self._part, self._config.start_deadline_s))

    def _without_list(self, limit_s: float, option: str, last: str) -> None:
        seconds = time.monotonic() - self._heard_of
        if seconds > limit_s:
            self._failed(f"router has not taken its list of engines for {seconds:.0f} s ({option}), last: {last}")

    def _failed(self, reason: str) -> None:
        stop_all([self._part], grace_s=0.0)  # also what it left behind
        pause = self._budget.failed(time.monotonic())
        what = f"{reason}\nrouter: {self._budget.describe(pause)}"
        if pause is None:
            raise PartFailed(what)
        self._state, self._until = _PAUSING, time.monotonic() + pause
        self._say(what)


@contextmanager
def router(config: RunConfig, files: RunFiles, say: Callable[[str], None]) -> Iterator[Router | None]:
    """The router while the block runs, if the configuration asks for one; it answers at the block's beginning."""
    if not config.engines.router:
        yield None
        return
    port, metrics = claim_port(_HOST, 0), claim_port(_HOST, 0)
    straight = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    command = router_command(_HOST, port, metrics)
    part = Part("router", command, files.logs / "router.log", inherited=straight)  # it speaks with engines alone
    control = RouterControl(f"http://{_HOST}:{port}", read_key(files.root))
    with supervised([part]):
        part.start()
        _wait(control, part, config.engines.start_deadline_s)
        say(f"router ready at {control.url}")
        yield Router(part, control, config, say)


def _wait(control: RouterControl, part: Part, deadline_s: float) -> None:
    limit = time.monotonic() + deadline_s
    while not control.answers():
        if part.poll() is not None:
            raise part.failure()
        if time.monotonic() > limit:
            raise PartFailed(_not_ready(part, deadline_s))
        time.sleep(_POLL_S)


def _not_ready(part: Part, deadline_s: float) -> str:
    limit = f"{deadline_s:g} s (engines.start_deadline_s)"
    return f"router was not ready after {limit}; its log is {part.log_path}, which ends:\n{log_tail(part.log_path)}"
