"""Evaluations while a run trains: `megatron-async evaluate` on its engines, every `evaluation.every` steps.

Invariants: training neither waits for an evaluation nor ends with one; there is at most one at a time, so that a slow
one makes the next late, never many. The engines get new versions meanwhile: each result says which it saw.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_async.bank import Bank
from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles, read_evaluations
from megatron_async.rollout.evaluation_files import results_folder
from megatron_async.supervise import Part, python_module


class PeriodicEvaluation:
    """Called again and again while the trainer runs.

    parts: the list that the supervisor stops; an evaluation that has not ended with the training is stopped, as the one
    after the last step follows. say: tells the user.
    """

    def __init__(self, config: RunConfig, bank: Bank, parts: list[Part], say: Callable[[str], None]) -> None:
        self._config, self._bank, self._parts, self._say = config, bank, parts, say
        self._every = config.evaluation.every
        self._seen = self._bank.steps_trained()
        self._running: Part | None = None
        self._of = 0

    def __call__(self) -> None:
        if not self._every or (self._running is not None and not self._ended(self._running)):
            return
        steps = self._bank.steps_trained()
        if steps // self._every > self._seen // self._every and steps < self._config.steps:
            self._begin(steps)
        self._seen = steps

    def _begin(self, steps: int) -> None:
        try:
            part = self._part(steps)
            part.start()
        except (UserError, OSError) as error:  # the tasks are not to be had now, or the machine has no room
            self._say(f"the evaluation after {steps} steps could not begin ({error}); training goes on")
            return
        self._parts.append(part)
        self._running, self._of = part, steps

    def _part(self, steps: int) -> Part:
        files = RunFiles(self._config.run_path)
        folder = results_folder(self._config, f"after_{steps}_steps")
        command = ("evaluate", "--config", str(files.config), "--folder", str(folder))
        return Part("evaluation", python_module("megatron_async", *command), files.logs / "evaluation.log")

    def _ended(self, part: Part) -> bool:
        if part.poll() is None:
            return False
        self._parts.remove(part)
        self._running = None
        if part.poll() == 0:
            success = 100 * read_evaluations(self._config.run_path)[-1]["success_rate"]
            self._say(f"after {self._of} steps: held-out success {success:.1f} %")
        else:
            self._say(
                f"the evaluation after {self._of} steps {part.ending()}: {part.user_error() or 'see its log'} "
                f"({part.log_path}); training goes on"
            )
        return True
