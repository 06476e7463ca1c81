"""sglang-router in front of the engines: how to start it, and its list of workers.

The router spreads ``/generate`` by the prefixes each engine has cached. It does not pass on pauses, aborts and weights:
they go to the engines directly. Invariants: a worker is added only by ``RouterControl``, so that an engine whose
weights are not the right ones yet gets no requests; the router itself repeats nothing (the pool does).

Adding and removing is queued by the router; ``set_workers`` returns at once and may be called again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from sglang_bridge import direct_http
from sglang_bridge.errors import EngineError, EngineUnreachable

# Longer than any generation; the pool's own deadline comes first.
_REQUEST_TIMEOUT_S = 24 * 3600
_CALL_S = 5.0


def router_command(host: str, port: int, metrics_port: int) -> list[str]:
    """Command line of a router without workers. ``metrics_port``: where it shows its own metrics, on loopback."""
    return [
        sys.executable, "-m", "sglang_router.launch_router", "--host", host, "--port", str(port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
        "--policy", "cache_aware", "--disable-retries", "--request-timeout-secs", str(_REQUEST_TIMEOUT_S),
    ]  # fmt: skip


class RouterControl:
    """The workers of the router at ``url``. ``api_key``: of the engines."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._key = api_key

    def answers(self) -> bool:
        """Whether the router is up (it may have no worker yet)."""
        try:
            self._call("GET", "/health")
        except EngineError:
            return False
        return True

    def workers(self) -> dict[str, str]:
        """The router's id of each worker, by the worker's address."""
        listed: Any = self._call("GET", "/workers").get("workers")
        try:
            return {str(worker["url"]).rstrip("/"): str(worker["id"]) for worker in listed}
        except (TypeError, KeyError) as error:
            raise EngineError(f"/workers lists no workers: {listed!r:.200}", url=self.url) from error

    def set_workers(self, urls: Iterable[str]) -> bool:
        """Ask the router to send requests to these engines and to no others; whether it did so already.

        Raises:
            EngineUnreachable: the router does not answer.
            EngineError: it refuses, or answers nonsense.
        """
        wanted, present = {url.rstrip("/") for url in urls}, self.workers()
        for url in present.keys() - wanted:
            self._call("DELETE", f"/workers/{present[url]}")
        for url in sorted(wanted - present.keys()):
            self._call("POST", "/workers", {"url": url, **({"api_key": self._key} if self._key else {})})
        return wanted == present.keys()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            status, content = direct_http.request(self.url + path, _CALL_S, method=method, body=data)
        except direct_http.NO_ANSWER as error:
            raise EngineUnreachable(f"{method} {path}: {error!r:.300}", url=self.url) from error
        if not 200 <= status < 300:
            text = content[:500].decode("utf-8", "replace")
            raise EngineError(f"{method} {path}: {text}", status=status, url=self.url)
        try:
            return dict(json.loads(content)) if content.lstrip().startswith(b"{") else {}
        except ValueError as error:
            raise EngineError(f"{method} {path}: not JSON ({error}): {content[:120]!r}", url=self.url) from error
