"""An asyncio loop on its own thread, so that synchronous code (a trainer) can have requests in flight."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

CLOSE_S = 30.0
"""What runs gets as long to take its cancellation."""


class BackgroundLoop:
    """Runs coroutines on a daemon thread; ``submit`` returns at once, ``run`` waits for the result."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``coroutine`` on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the loop and wait for it; its own deadlines bound the wait."""
        return self.submit(coroutine).result()

    def close(self) -> None:
        """Cancel what still runs, end the loop and its thread. One that is blocked and does not come back within
        `CLOSE_S` seconds is left behind, as a daemon."""
        if not wait([self.submit(_cancel_others())], timeout=CLOSE_S).done:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
