"""sglang-router as a part of a run: started on this machine, given the engines that serve, watched.

Invariants: it listens on loopback alone; an engine is in its list only while the roster calls it serving; when it dies
the run ends with the tail of its log (the engines could be asked directly, but that is not what was configured).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megatron_async.config.schema import RunConfig
from megatron_async.engine_key import read_key
from megatron_async.observe import RunFiles
from megatron_async.supervise import Part, PartFailed, supervised
from sglang_bridge import EngineError
from sglang_bridge.router import RouterControl, router_command
from sglang_bridge.server import claim_port

_POLL_S = 0.2
_AGAIN_S = 5.0
_HOST = "127.0.0.1"


class Router:
    """The router of a run; without one (`part` None) everything here does nothing. url: its address, or ""."""

    def __init__(self, part: Part | None, control: RouterControl | None) -> None:
        self._part, self._control = part, control
        self._wanted: list[str] = []
        self._asked_at = 0.0
        self.url = "" if control is None else control.url

    def follow(self, urls: Sequence[str]) -> None:
        """Send requests to these engines. Repeated now and then: the router only queues what it is asked."""
        if self._control is None:
            return
        now = time.monotonic()
        if list(urls) == self._wanted and now - self._asked_at < _AGAIN_S:
            return
        self._wanted, self._asked_at = list(urls), now
        try:
            self._control.set_workers(urls)
        except EngineError as error:
            self.check()
            raise PartFailed(f"the router does not take its list of engines: {error}") from error

    def check(self) -> None:
        """Raises PartFailed when it ended."""
        if self._part is not None and self._part.poll() is not None:
            raise self._part.failure()


@contextmanager
def router(config: RunConfig, files: RunFiles, say: Callable[[str], None]) -> Iterator[Router]:
    """The router while the block runs, if the configuration asks for one; it answers at the block's beginning."""
    if not config.engines.router:
        yield Router(None, None)
        return
    port, metrics = claim_port(_HOST, 0), claim_port(_HOST, 0)
    part = Part("router", router_command(_HOST, port, metrics), files.logs / "router.log")
    front = Router(part, RouterControl(f"http://{_HOST}:{port}", read_key(files.root)))
    with supervised([part]):
        part.start()
        _wait(front, part, config.engines.start_deadline_s)
        say(f"router ready at {front.url}")
        yield front


def _wait(front: Router, part: Part, deadline_s: float) -> None:
    limit = time.monotonic() + deadline_s
    assert front._control is not None
    while not front._control.answers():
        front.check()
        if time.monotonic() > limit:
            raise PartFailed(f"the router was not ready after {deadline_s:g} s; its log is {part.log_path}")
        time.sleep(_POLL_S)
