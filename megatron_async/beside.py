"""What the parts that run beside the trainer on ranks of their own have in common.

Invariants: rank 0 decides what all ranks do next and speaks often enough that the others see that it lives; what goes
wrong on rank 0 is raised on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist

from megatron_async.config.schema import RunConfig
from megatron_async.engine import platform
from megatron_async.observe import StatusWriter, Timeline
from megatron_async.training.control import MARGIN_S, Control

T = TypeVar("T")
Counters = Mapping[str, float]

LAST, NOTHING = b"E", b"N"
"""Kinds of message from rank 0 that every part knows."""
SILENCE_S = 10.0
"""Rank 0 speaks at least this often."""


class PartBeside(ABC):
    """One rank of such a part, after it joined the process group. name: of the part."""

    def __init__(self, config: RunConfig, name: str) -> None:
        self.config = config
        self.leads = dist.get_rank() == 0
        self._control = Control(config.trainer.deadline_s + MARGIN_S)
        self._status = StatusWriter(config.run_path, name) if self.leads else None
        self._timeline = Timeline(config.run_path if self.leads else None, name)

    def run(self) -> int:
        """Do what rank 0 says until it says that this was all; returns the exit code. Collective."""
        try:
            while self.step():
                continue
        finally:
            self.close()
            platform.shutdown()
        return 0

    def step(self) -> bool:
        """Do the next thing; False when there is none. Collective."""
        message = self._control.from_rank_zero(self._next)
        kind, body = message[:1], message[1:]
        if kind not in (LAST, NOTHING):
            self._do(kind, body)
        return kind != LAST

    @abstractmethod
    def _next(self) -> bytes:
        """On rank 0: a byte for the kind, then what it needs; within `SILENCE_S` seconds."""

    @abstractmethod
    def _do(self, kind: bytes, body: bytes) -> None:
        """What `_next` said (collective)."""

    def _timed(self, stage: str, number: int, work: Callable[[], T], counters: Counters | None = None) -> T:
        """Show and time a piece of work. number: how far the part is (versions, updates)."""
        self._show(stage, "", counters)
        with self._timeline.stage(stage, number):
            return work()

    def _show(self, phase: str, waits_for: str, counters: Counters | None = None) -> None:
        if self._status is not None:
            self._status.set(phase, waits_for, counters)

    def close(self) -> None:
        """Close the files; idempotent."""
        for part in (self._status, self._timeline):
            if part is not None:
                part.close()
