"""Writes running trajectories into the bank: regularly, so that a kill costs little, and when the trainer asks for it.

`Streaming` writes down what was produced since its last round: after a kill, at most what came in between is lost. A
trajectory is written whole, its routed experts included, so a long one is written in fewer rounds.
`PartialWriter` answers the trainer, who wants to score what running trajectories hold so far.

Invariants: answers that were under way when the engines were stopped have come back, and their tokens are in what the
trainer gets; a trajectory's snapshot is taken on the event loop, so no other thread reads what grows.
A request that an engine got while it was stopped holds no token and does not come back before the engine goes on: it is
not waited for. When it was sent at the very moment of the stop, only time can tell: it is waited for `GRACE_S` seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_async.rollout.agent_loop import EpisodeProgress
from megatron_async.rollout.ledger import Ledger
from megatron_async.trajectory import Trajectory

GRACE_S = 0.5
_LOOK_S = 0.01
_AT_ONCE = 64
_TOKENS_PER_ROUND = 8192
"""Of one trajectory, at most about so many are written in a round, on the average over rounds."""
_MOST_ROUNDS = 16
"""From one write to the next, of a trajectory of any length."""


@dataclass(frozen=True, slots=True)
class Played:
    """A trajectory and what its episode is doing."""

    trajectory: Trajectory
    progress: EpisodeProgress

    def settle(self) -> None:
        """Append to the trajectory what its answer under way has streamed, as far as its version is certain."""
        if self.progress.streamed is not None:
            self.progress.streamed.settle()


class _Written(NamedTuple):
    """What was last written of a trajectory: (tokens, turns, tokens withdrawn so far), and in which round."""

    size: tuple[int, int, int]
    round: int


class Streaming:
    """playing: the running trajectories by id, live. every_s: seconds between two rounds.

    A trajectory of n tokens is written every n // 8192 rounds, at least every 16th, and of less than 16,384 in each.
    A round's cost for the event loop is that of looking; what has grown is serialised on the bank's thread, many
    trajectories in one transaction, and the next round begins when it is on the disk.
    """

    def __init__(self, ledger: Ledger, playing: Mapping[str, Played], every_s: float) -> None:
        self._ledger = ledger
        self._playing = playing
        self._every_s = every_s
        self._written: dict[str, _Written] = {}
        self._round = 0
        self.tokens = 0
        """Tokens written down by all rounds, prompts and observations included."""

    async def run(self) -> None:
        """Write down every `every_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.round()

    async def round(self) -> None:
        """Write down the running trajectories that have grown and whose turn it is."""
        self._round += 1
        await self._write([name for name, played in self._playing.items() if self._is_due(name, played)])

    async def flush(self) -> None:
        """Write down every running trajectory that has grown since it last was."""
        await self._write(list(self._playing))

    def _is_due(self, name: str, played: Played) -> bool:
        last = self._written.get(name)
        if last is None or last.size[2] != played.progress.withdrawn:  # what is written now is nothing, or wrong
            return True
        return self._round - last.round >= min(len(played.trajectory) // _TOKENS_PER_ROUND, _MOST_ROUNDS)

    async def _write(self, names: list[str]) -> None:
        self._written = {name: last for name, last in self._written.items() if name in self._playing}
        for begin in range(0, len(names), _AT_ONCE):
            grown = [taken for name in names[begin : begin + _AT_ONCE] if (taken := self._grown(name)) is not None]
            if grown:
                await self._ledger.checkpoint(grown)

    def _grown(self, name: str) -> Trajectory | None:
        played = self._playing.get(name)  # it may have ended while others were written
        if played is None:
            return None
        played.settle()
        trajectory = played.trajectory
        # Withdrawn tokens may have been followed by as many others.
        now = (len(trajectory), trajectory.num_turns, played.progress.withdrawn)
        before = self._written.get(name, _Written((0, 0, 0), 0)).size
        if now == before:
            return None
        self._written[name] = _Written(now, self._round)
        self.tokens += max(0, now[0] - before[0])
        return trajectory.snapshot()


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
                for played in self._playing.values():
                    played.settle()
                await self._ledger.write_down([p.trajectory.snapshot() for p in self._playing.values()], asked)
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
