"""Stopping generation before an update, so that every token of the version that is about to go can be scored by it.

Invariants: while engines are held no token is sampled, and every token sampled before is in the bank when `collect`
returns; what goes wrong on rank 0 is raised on every rank; engines that were held are let go by the publishing that
follows, or by `release` when there is none.
"""

from __future__ import annotations

import time

from megatron_async.bank import Bank
from megatron_async.bank.requests import WRITE_DOWN, WRITTEN_DOWN
from megatron_async.config.schema import RunConfig
from megatron_async.errors import PartnerGone
from megatron_async.training.batch import join_messages, split_messages
from megatron_async.training.control import Control
from megatron_async.training.engine_group import EngineGroup
from megatron_async.trajectory import Trajectory

_LOOK_S = 0.02


class InterruptionDeadline(PartnerGone):
    """The rollout did not write its running trajectories down in time."""


class Interruption:
    """bank, engines: on rank 0 only."""

    def __init__(
        self, config: RunConfig, control: Control, bank: Bank | None, engines: EngineGroup | None
    ) -> None:
        self._deadline_s = config.publish.deadline_s
        self._control = control
        self._bank = bank
        self._engines = engines
        self._held_at: float | None = None
        self._metrics: dict[str, float] = {}

    def collect(self, version: int) -> list[Trajectory]:
        """Hold the engines, have partial trajectories written down, and return those with tokens of `version`.

        Running ones and finished ones that wait; the batch in hand is not among them. Collective.
        Raises InterruptionDeadline, PublishError.
        """
        began = time.monotonic()
        message = self._control.from_rank_zero(lambda: self._collect(version))
        self._metrics["interrupt/collect_seconds"] = time.monotonic() - began
        return [Trajectory.from_bytes(part) for part in split_messages(message)]

    def _collect(self, version: int) -> bytes:
        assert self._bank is not None and self._engines is not None, "rank 0 owns bank and engines"
        self._held_at = started = time.monotonic()
        asked = str(int(self._engines.hold() * 1e9))
        self._bank.set_state(WRITE_DOWN, asked)
        while self._bank.get_state(WRITTEN_DOWN) != asked:
            if time.monotonic() - started > self._deadline_s:
                raise InterruptionDeadline(
                    f"version {version}: the rollout has not written its running trajectories down in "
                    f"{self._deadline_s:g} s (publish.deadline_s); look at status/rollout.json and logs/rollout.log"
                )
            time.sleep(_LOOK_S)
        found = self._bank.list_sampled_by(version)
        self._metrics["interrupt/trajectories"] = float(len(found))
        return join_messages([trajectory.to_bytes() for trajectory in found])

    def release(self) -> None:
        """Let held engines go on; nothing to do where publishing has."""
        if self._engines is not None and self._held_at is not None:
            self._engines.release()
        self.published()

    def published(self) -> None:
        """The engines sample again, as publishing leaves them."""
        if self._held_at is not None:
            self._metrics["interrupt/paused_seconds"] = time.monotonic() - self._held_at
        self._held_at = None

    def take_metrics(self) -> dict[str, float]:
        """What the last interruption cost, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics
