"""Ending between two steps because somebody asked: the launcher, through the bank, or a signal where there is none.

Invariants: rank 0 decides, and all ranks end at the same place; under a launcher signals keep their meaning, so that
ranks whose launcher was killed end at once instead of training beside those of the next one.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from megatron_async.bank import Bank
from megatron_async.bank.requests import STOP
from megatron_async.supervise import PART_VARIABLE

logger = logging.getLogger(__name__)

LAUNCHER = "its launcher"


class StopAsked(Exception):
    """Raised on every rank between two steps. steps: those that are trained. by: `LAUNCHER`, or a signal's name."""

    def __init__(self, steps: int, by: str) -> None:
        super().__init__(f"asked to stop after {steps} steps by {by}")
        self.steps, self.by = steps, by


class StopRequest:
    """Whether somebody wants the trainer to end. bank: on rank 0 only.

    As a block, without a launcher, the first SIGINT or SIGTERM is a request; a second one does what it always did.
    """

    def __init__(self, bank: Bank | None) -> None:
        self._bank = bank
        self._mark = os.environ.get(PART_VARIABLE)
        self._signal = ""
        self._before: dict[int, signal.Handlers] = {}

    def __enter__(self) -> Self:
        if self._mark is None and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)  # type: ignore[assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def by(self) -> str:
        """Who asked; empty while nobody did."""
        if self._signal:
            return self._signal
        asked = self._mark is not None and self._bank is not None and self._bank.get_state(STOP) == self._mark
        return LAUNCHER if asked else ""

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
