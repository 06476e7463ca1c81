"""Writes running trajectories into the bank when the trainer asks for it, so that it can score what they hold so far.

Invariants: answers that were under way when the engines were stopped have come back, and their tokens are in what is
written; a trajectory is copied on the event loop, so no other thread reads it while it grows.
A request that an engine got while it was stopped holds no token and does not come back before the engine goes on: it is
not waited for. When it was sent at the very moment of the stop, only time can tell: it is waited for `GRACE_S` seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_async.rollout.agent_loop import EpisodeProgress
from megatron_async.rollout.ledger import Ledger
from megatron_async.trajectory import Trajectory

GRACE_S = 0.5
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Played:
    """A trajectory and what its episode is doing."""

    trajectory: Trajectory
    progress: EpisodeProgress


class PartialWriter:
    """playing: the running trajectories by id, live. poll_s: seconds between two looks for a question."""

    def __init__(self, ledger: Ledger, playing: Mapping[str, Played], poll_s: float) -> None:
        self._ledger = ledger
        self._playing = playing
        self._poll_s = poll_s

    async def run(self) -> None:
        """Answer the trainer's questions until cancelled."""
        while True:
            asked = await self._ledger.asked_to_write_down()
            if asked is not None:
                await self._answers_under_way(stopped_at=int(asked) / 1e9)
                await self._ledger.write_down([_copy(p.trajectory) for p in self._playing.values()], asked)
            await asyncio.sleep(self._poll_s)

    async def _answers_under_way(self, stopped_at: float) -> None:
        """Until every request that was sent before the engines stopped (Unix seconds) has come back."""
        started = time.monotonic()
        sent = {
            name: played.progress.requests_sent
            for name, played in self._playing.items()
            if played.progress.request_sent_at <= stopped_at
        }
        while time.monotonic() - started < GRACE_S and any(
            name in self._playing and self._playing[name].progress.requests_returned < count
            for name, count in sent.items()
        ):
            await asyncio.sleep(_LOOK_S)


def _copy(trajectory: Trajectory) -> Trajectory:
    return Trajectory.from_bytes(trajectory.to_bytes())
