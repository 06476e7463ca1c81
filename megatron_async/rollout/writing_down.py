"""Writes running trajectories into the bank when the trainer asks for it, so that it can score what they hold so far.

Invariants: every answer that was under way when the question was seen has come back, and its tokens are in what is
written; a trajectory is copied on the event loop, so no other thread reads it while it grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_async.rollout.agent_loop import EpisodeProgress
from megatron_async.rollout.ledger import Ledger
from megatron_async.trajectory import Trajectory

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
                await self._answers_under_way()
                await self._ledger.write_down([_copy(p.trajectory) for p in self._playing.values()], asked)
            await asyncio.sleep(self._poll_s)

    async def _answers_under_way(self) -> None:
        """Until every request that is with an engine now has come back."""
        sent = {name: played.progress.requests_sent for name, played in self._playing.items()}
        while any(
            name in self._playing and self._playing[name].progress.requests_returned < count
            for name, count in sent.items()
        ):
            await asyncio.sleep(_LOOK_S)


def _copy(trajectory: Trajectory) -> Trajectory:
    return Trajectory.from_bytes(trajectory.to_bytes())
