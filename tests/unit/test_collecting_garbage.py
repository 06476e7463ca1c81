"""The collector is quiet while episodes are played, and as before afterwards."""

from __future__ import annotations

import asyncio
import gc

from megatron_async.rollout import collecting_garbage


def test_full_collections_come_when_they_are_due_and_at_no_other_time() -> None:
    before, full = gc.get_threshold(), []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(1)

    async def play() -> None:
        async with collecting_garbage.rarely(every_s=0.2):
            assert gc.get_freeze_count() > 0
            begun = len(full)
            kept = [[number] for number in range(200_000)]  # enough for full collections by default
            assert len(full) == begun and len(kept) == 200_000
            async with asyncio.timeout(60):
                while len(full) == begun:
                    await asyncio.sleep(0.02)

    gc.callbacks.append(note)
    try:
        asyncio.run(play())
    finally:
        gc.callbacks.remove(note)
    assert full
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
