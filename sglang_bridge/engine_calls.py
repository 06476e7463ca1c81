"""The same call to every engine at once, from synchronous code, with each failure named by its engine.

Invariants: nothing is sent twice (an update call is not idempotent: its broadcast is consumed); every wait ends after
the deadline; an error that is not an engine's (a bug) is raised as it is.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from sglang_bridge.client import EngineClient
from sglang_bridge.errors import EngineError, PublishError
from sglang_bridge.event_loop import BackgroundLoop

T = TypeVar("T")


class EngineCalls:
    """Clients of the engines at ``urls`` on a loop of their own. ``deadline_s``: longest wait for any one call."""

    def __init__(self, urls: Sequence[str], deadline_s: float, api_key: str = "") -> None:
        self.deadline_s = deadline_s
        self._api_key = api_key
        self._loop = BackgroundLoop("publisher")
        self._closed = False
        self.clients: list[EngineClient] = []
        self.follow(urls)

    @property
    def urls(self) -> list[str]:
        """Addresses of the engines."""
        return [client.url for client in self.clients]

    def follow(self, urls: Sequence[str]) -> None:
        """Speak to these engines from now on."""
        kept = {client.url: client for client in self.clients}
        wanted = list(dict.fromkeys(url.rstrip("/") for url in urls))
        for url in kept.keys() - set(wanted):
            self._loop.run(kept[url].close())
        self.clients = [kept[url] if url in kept else self._client(url) for url in wanted]

    def _client(self, url: str) -> EngineClient:
        return EngineClient(url, api_key=self._api_key, control_deadline_s=self.deadline_s, retries=0)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        if not self._closed:
            self._closed = True
            self.follow([])
            self._loop.close()

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Start one call."""
        return self._loop.submit(call)

    def post(self, client: EngineClient, path: str, body: dict[str, Any]) -> Future[dict[str, Any]]:
        """Start one control call."""
        return self.submit(client.call(path, body))

    def everywhere(self, step: str, call: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> list[T]:
        """``call`` on every engine at once; the answers in the order of ``urls``.

        Raises:
            PublishError: names each engine that failed, and the step.
        """
        return self.settle(step, [self.submit(call(client)) for client in self.clients])

    def settle(self, step: str, calls: Sequence[Future[T]]) -> list[T]:
        """Wait for one call per engine; the answers. Raises as ``everywhere``."""
        # A little longer than the calls' own deadline, so that their error, which says more, comes first.
        concurrent.futures.wait(calls, timeout=self.deadline_s + 2.0)
        failures = self.failures(calls)
        if failures:
            raise failed(step, failures, len(calls))
        return [call.result() for call in calls]

    def failures(self, calls: Sequence[Future[Any]], *, silent: bool = True) -> dict[str, str]:
        """What went wrong with the call to each engine; ``silent`` counts calls that have not come back."""
        found = {}
        for url, call in zip(self.urls, calls):
            if not call.done():
                if silent:
                    found[url] = f"{url} has not answered"
            elif (error := call.exception()) is not None:
                if not isinstance(error, EngineError):
                    raise error
                found[url] = str(error)
        return found


def failed(step: str, failures: dict[str, str], engines: int, cause: BaseException | None = None) -> PublishError:
    """The error for a step that failed on some engines. ``failures``: by address; empty when nobody is known."""
    return PublishError(
        f"could not {step} on {len(failures) or 'any'} of {engines} engines: {'; '.join(failures.values()) or cause}",
        urls=tuple(failures),
    )
