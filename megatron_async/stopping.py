"""The first Ctrl-C: the trainer ends its step and writes a checkpoint before everything is stopped.

Invariants: nobody waits longer than `trainer.stop_deadline_s`, and not at all when the trainer has trained nothing
since it started; what is asked of one run's trainer is not heard by another's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from megatron_async.bank import Bank
from megatron_async.bank.requests import STOP
from megatron_async.config.schema import RunConfig
from megatron_async.observe import RunFiles
from megatron_async.supervise import Asked, Part, StopRequested, describe_exit

_POLL_S = 0.1

Tick = Callable[[], None]


class Stopping:
    """Called again and again while the trainer runs; once a stop is asked for, it ends in StopRequested.

    trainer: the part whose ranks train. asked: what the first signal changes. say: tells the user. ticks: called
    while the trainer ends its step, which needs engines that are looked after.
    """

    def __init__(
        self, config: RunConfig, bank: Bank, trainer: Part, asked: Asked, say: Callable[[str], None], *ticks: Tick
    ) -> None:
        self._config, self._bank, self._trainer, self._asked, self._say = config, bank, trainer, asked, say
        self._ticks = ticks
        self._pid: int | None = None
        self._began_with: object = None

    def __call__(self) -> None:
        if self._trainer.pid != self._pid:
            self._pid, self._began_with = self._trainer.pid, self._made()
        if not self._asked.by:
            return
        if self._trainer.poll() is None and self._something_to_keep():
            self._end_step()
        raise StopRequested(self._asked.by, outcome=self._outcome())

    def _made(self) -> object:
        """Changes with every step that is trained, also with one that is trained again."""
        return self._bank.versions()[-1].version, sum(step.state == "committed" for step in self._bank.steps())

    def _something_to_keep(self) -> bool:
        return self._made() != self._began_with or any(step.state == "reserved" for step in self._bank.steps())

    def _end_step(self) -> None:
        deadline_s = self._config.trainer.stop_deadline_s
        self._say(
            f"{self._asked.by}: the trainer ends its step and writes a checkpoint, which may take up to "
            f"{deadline_s:g} s (trainer.stop_deadline_s); a second Ctrl-C ends everything now"
        )
        self._bank.set_state(STOP, self._trainer.mark)
        limit = time.monotonic() + deadline_s
        while self._trainer.poll() is None and time.monotonic() < limit:
            for tick in self._ticks:
                tick()
            time.sleep(_POLL_S)

    def _outcome(self) -> str:
        """How far the run got, and what of that a resume finds."""
        steps = sum(step.state == "committed" for step in self._bank.steps())
        saved = newest_checkpoint(RunFiles(self._config.run_path))
        text = f" after {steps} steps" if steps else " before a step was trained"
        if steps > saved:
            text += f"; the newest checkpoint holds {saved}, the others are trained again"
        elif steps:
            text += ", which are in the checkpoint"
        code = self._trainer.poll()
        if code is None and self._something_to_keep():
            text += f"; its step did not end in {self._config.trainer.stop_deadline_s:g} s (trainer.stop_deadline_s)"
        elif code:
            text += f"; the trainer {describe_exit(code)} meanwhile, see {self._trainer.log_path}"
        return text


def newest_checkpoint(files: RunFiles) -> int:
    """Steps in the newest checkpoint that was completed; 0 where there is none."""
    found = (re.fullmatch(r"step_(\d+)", path.parent.name) for path in files.checkpoints.glob("step_*/manifest.json"))
    return max((int(match[1]) for match in found if match), default=0)
