"""Trainer and rollout of a run: started in their order, and started again when one ends before its work is done.

Invariants
- The rollout runs only while the engines hold the version that the trainer goes on from: it starts after the trainer
  has published that version, and is stopped (it writes its episodes down) before a trainer starts again.
- A trainer that starts again goes on from the newest checkpoint and trains recorded batches again, as after
  `launch --resume`; a rollout that starts again goes on with the episodes that were written down.
- Nothing of a part is alive when it is started again.
- A run ends with the part's failure when `trainer.max_restarts` starts in a row brought no further step, when no step
  was ever trained (that is a mistake, not an accident), or when the part itself says that the user has to mend
  something (`Part.user_error`; torchrun swallows exit codes).
- A rollout that ends while the run is not finished is started again whatever its exit code: a SIGTERM from outside
  ends it with 0.
- A part that stands still (`health`) is ended, and then is one that ended by itself.
- Every start after the first is in `restarts.jsonl` of the run's folder, with what ended the part.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_async.bank import Bank
from megatron_async.bank.requests import FINISHED, PHASE, RESUMING
from megatron_async.config.schema import RunConfig
from megatron_async.health import Guard
from megatron_async.observe import RunFiles
from megatron_async.supervise import Part, log_tail, stop_all

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_PAUSE_S = 1.0
"""Seconds before a start after the first, times the number of starts in a row without a step: what ended the part may
need a moment to pass (a full disk, a database that restarts)."""

Tick = Callable[[], None]


class Roles:
    """training: parts that start and end together, the trainer last. rollout: the rollout process. parts: the list that
    the supervisor stops; parts are added as they start."""

    def __init__(self, config: RunConfig, training: Sequence[Part], rollout: Part, parts: list[Part]) -> None:
        self._config = config
        self._files = RunFiles(config.run_path)
        self._training = list(training)
        self._rollout = rollout
        self._parts = parts
        self._guard = Guard(config, [*training, rollout], with_stages=[part.name for part in training])
        self._steps = 0
        self._in_vain = 0

    def run(self, *ticks: Tick) -> None:
        """Until the trainer is done. ticks: called twice a second; what they raise ends the run.

        Raises PartFailed.
        """
        with Bank.open(self._config.bank_url) as bank:
            self._steps = bank.steps_trained()
            self._begin(bank, *ticks)
            while self._training[-1].poll() != 0:
                self._look_after(bank, *ticks)
                for tick in ticks:
                    tick()
                self._guard()
                time.sleep(_POLL_S)

    def _begin(self, bank: Bank, *ticks: Tick) -> None:
        """Start the trainer, wait until the engines hold its version, start the rollout."""
        self._start(*self._training)
        while bank.get_state(PHASE) == RESUMING and self._training[-1].poll() != 0:
            for part in self._training:
                if part.poll() not in (None, 0):
                    self._failed(part, bank)
                    self._restart(self._training)
            for tick in ticks:
                tick()
            self._guard()
            time.sleep(_POLL_S)
        self._start(self._rollout)

    def _look_after(self, bank: Bank, *ticks: Tick) -> None:
        if any(part.poll() not in (None, 0) for part in self._training):
            part = next(part for part in self._training if part.poll() not in (None, 0))
            self._failed(part, bank)
            stop_all([self._rollout, *self._training])
            bank.set_state(PHASE, RESUMING)
            self._begin(bank, *ticks)
        elif self._rollout.poll() is not None and bank.get_state(PHASE) != FINISHED:
            self._failed(self._rollout, bank)
            self._restart([self._rollout])

    def _failed(self, part: Part, bank: Bank) -> None:
        """Record the failure; raise it when the part is not to be started again."""
        steps = bank.steps_trained()
        self._in_vain = 0 if steps > self._steps else self._in_vain + 1
        self._steps = max(self._steps, steps)
        trainer, says = self._config.trainer, self._who_says_why(part)
        mistake = says is not None or (self._steps == 0 and part.poll() != 0)
        # Ranks on other machines are started by those.
        if mistake or trainer.nodes > 1 or self._in_vain > trainer.max_restarts:
            raise (says or part).failure()
        self._record(part, steps)
        time.sleep(_PAUSE_S * self._in_vain)

    def _who_says_why(self, part: Part) -> Part | None:
        """The part that said what the user has to mend: those that train together hear of it as the other's end."""
        together = [part] if part is self._rollout else [part, *self._training]
        return next((each for each in together if each.user_error()), None)

    def _record(self, part: Part, steps: int) -> None:
        row: dict[str, Any] = {
            "time": time.time(),
            "part": part.name,
            "exit_code": part.poll(),
            "ending": part.ending(),
            "steps": steps,
            "log": log_tail(part.log_path, lines=1),
        }
        logger.warning(
            "%s %s after %d steps and is started again (%d of %d without a further step)",
            part.name, row["ending"], steps, self._in_vain, self._config.trainer.max_restarts,
        )  # fmt: skip
        # A full disk may be what ended the part; it must not end the run too.
        with contextlib.suppress(OSError), self._files.restarts.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _restart(self, parts: Sequence[Part]) -> None:
        stop_all(parts)
        self._start(*parts)

    def _start(self, *parts: Part) -> None:
        for part in parts:
            if part not in self._parts:
                self._parts.append(part)
            part.start()
