"""Tasks of another process, fetched before they are asked for: whoever asks is an event loop, which must not wait.

Invariant: a finite source of up to `MOST_AHEAD` blocks is fetched whole from the start; of a longer one the block after
the one in use is. Only a jump into a block that nobody has asked for waits, as long as the fetch takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from megatron_async.rollout.environments.base import EnvironmentFailure

BLOCK = 512
"""Tasks in one answer."""
MOST_AHEAD = 64

Item = Mapping[str, Any]


class TasksAhead:
    """What a source in another process says about its tasks, by index."""

    def __init__(self, size: int | None, fetch: Callable[[int, int], Sequence[Item]]) -> None:
        """fetch: (first index, count) -> that many items, fewer at the end of the source; called in a thread, and
        again after an EnvironmentFailure."""
        self._size, self._fetch = size, fetch
        self._blocks: dict[int, Future[Sequence[Item]]] = {}
        self._request(range(1 if size is None else min(MOST_AHEAD, self._count())))

    def item(self, index: int) -> Item:
        """The item with this index. Raises IndexError past the end, and what fetching it raised."""
        if index < 0 or (self._size is not None and index >= self._size):
            raise IndexError(f"task {index}: the source has {self._size} tasks")
        number, place = divmod(index, BLOCK)
        self._request(range(number, min(number + 2, self._count())))
        return self._blocks[number].result()[place]

    def known(self) -> list[Item]:
        """All items that are there by now."""
        blocks = [block for block in list(self._blocks.values()) if block.done() and block.exception() is None]
        return [item for block in blocks for item in block.result()]

    def _count(self) -> int:
        """Blocks of the source; more than anybody asks for, where it is endless."""
        return 2**62 if self._size is None else -(-self._size // BLOCK)

    def _request(self, numbers: Sequence[int]) -> None:
        failed = [number for number, block in self._blocks.items() if block.done() and block.exception() is not None]
        for number in failed:
            del self._blocks[number]
        new: dict[int, Future[Sequence[Item]]] = {n: Future() for n in numbers if n not in self._blocks}
        self._blocks |= new
        if new:
            threading.Thread(target=self._run, args=(new,), daemon=True).start()

    def _run(self, blocks: Mapping[int, Future[Sequence[Item]]]) -> None:
        for number, block in blocks.items():
            try:
                block.set_result(self._tried_twice(number * BLOCK))
            except Exception as error:  # noqa: BLE001 - raised where the task is asked for
                block.set_exception(error)

    def _tried_twice(self, start: int) -> Sequence[Item]:
        try:
            return self._fetch(start, BLOCK)
        except EnvironmentFailure:  # the process is another by now
            return self._fetch(start, BLOCK)
