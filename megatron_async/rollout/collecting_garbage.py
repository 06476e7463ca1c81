"""Garbage collection in a process that plays a thousand episodes at once.

Python's collector stops the event loop while it looks at objects. A full look at everything such a process holds takes
a quarter of a second, and by default comes every few seconds. Here what was there before the first episode is left out
for good, young objects are looked at when many have gathered, and everything else every `EVERY_S` seconds: reference
counts free nearly all of what episodes leave, so that little waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

EVERY_S = 300.0
"""Seconds between two full collections."""

_THRESHOLDS = (100_000, 10, 1_000_000)
"""Allocations, less what was freed, between looks at the youngest objects: such a look takes some 50 ms with a thousand
episodes, whose answers under way are all young, and then comes every 20 s or so. Such looks between two at those that
survived one; and, as good as never, between two full ones."""


@contextlib.asynccontextmanager
async def rarely(every_s: float = EVERY_S) -> AsyncIterator[None]:
    """Within the block, full collections come every `every_s` seconds, and leave out what was there before it."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    task = asyncio.create_task(_collect(every_s), name="garbage")
    try:
        yield
    finally:
        task.cancel()
        gc.set_threshold(*before)
        gc.unfreeze()


async def _collect(every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        gc.collect()
