"""`megatron-async evaluate`: success on held-out tasks of a run's engines, a checkpoint, or a chat endpoint.

Invariants: without a policy named, the engines of the run are asked and the run gets a row in `evaluations.jsonl`; a
checkpoint or an endpoint has a folder of its own, so it never mixes with a run's history. An interrupted evaluation
goes on where it stopped. No engine that was started here outlives the command.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_async import launch
from megatron_async.claim import claimed
from megatron_async.config.placement import place
from megatron_async.config.schema import RunConfig
from megatron_async.errors import EXIT_STOPPED, UserError
from megatron_async.fleet import fleet
from megatron_async.observe import RunFiles
from megatron_async.rollout import evaluation
from megatron_async.rollout.chat_endpoint import EndpointOptions
from megatron_async.rollout.endpoint_policy import endpoint_options, evaluate_endpoint
from megatron_async.rollout.evaluation_files import results_folder
from megatron_async.rollout.evaluation_statistics import EvaluationResult, describe
from megatron_async.rollout.task_checks import heldout_tasks
from megatron_async.supervise import PartFailed, StopRequested, stop_on_signals

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluatedPolicy:
    """What to evaluate: the engines of the run (nothing given), a checkpoint, or an endpoint.

    checkpoint: a Hugging Face folder; engines are started on it as the configuration says. endpoint: base URL of an
    OpenAI-compatible server, with the model's name there and the environment variable that holds its key ("" for
    none). folder: where results go (None: `<run>/evaluation/<who>/<what>`, see `evaluation_files`).
    """

    checkpoint: Path | None = None
    endpoint: str = ""
    endpoint_model: str = "default"
    endpoint_key_env: str = ""
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.checkpoint is not None and self.endpoint:
            raise UserError("--checkpoint and --endpoint name two policies: choose one")
        if self.checkpoint is not None and not (self.checkpoint / "config.json").is_file():
            raise UserError(f"--checkpoint {self.checkpoint}: no Hugging Face checkpoint (no config.json in it)")

    @property
    def of_the_run(self) -> bool:
        """Whether the engines of the run are asked."""
        return self.checkpoint is None and not self.endpoint

    def place(self, config: RunConfig) -> Path:
        """The folder for the results."""
        if self.folder is not None:
            return self.folder
        if self.of_the_run:
            return results_folder(config, "engines")
        checkpoint = self.checkpoint
        return results_folder(config, self.endpoint_model if checkpoint is None else str(checkpoint.resolve()))


def main(config: RunConfig, policy: EvaluatedPolicy = EvaluatedPolicy()) -> int:
    """Evaluate, print the page, keep it; returns the exit code. Raises UserError for what the user can mend."""
    heldout_tasks(config)
    try:
        with stop_on_signals():
            folder = policy.place(config)
            if policy.of_the_run:
                result = evaluation.evaluate_run(config, folder)
            else:
                result = _alone(config, policy, folder)
    except StopRequested as stop:
        print(f"stopped by {stop}; the same command goes on with what was played")  # noqa: T201
        return EXIT_STOPPED
    print(f"{describe(result)}results: {folder}")  # noqa: T201
    return 0


def _alone(config: RunConfig, policy: EvaluatedPolicy, folder: Path) -> EvaluationResult:
    """Evaluate a checkpoint or an endpoint; the folder is held meanwhile."""
    with claimed(folder):
        if policy.checkpoint is None:
            try:
                return evaluate_endpoint(config, _options(config, policy), folder)
            except ValueError as error:
                raise UserError(str(error)) from error
        return _checkpoint(replace(config, model=replace(config.model, path=str(policy.checkpoint))), folder)


def _options(config: RunConfig, policy: EvaluatedPolicy) -> EndpointOptions:
    return endpoint_options(config, policy.endpoint, policy.endpoint_model, policy.endpoint_key_env)


def _checkpoint(config: RunConfig, folder: Path) -> EvaluationResult:
    files = RunFiles(folder)
    files.logs.mkdir(parents=True, exist_ok=True)
    engines = replace(config.engines, host="127.0.0.1", max_restarts=0)  # one that dies ends it: it can be repeated
    config = replace(config, engines=engines)
    with fleet(config, files, place(config)[0], engines.host, launch.say) as here:

        def tick() -> None:
            here.tick()
            if here.hopeful < engines.count:
                raise PartFailed("an engine ended:\n" + "\n".join(here.describe()))

        urls = [engine.url for engine in here.engines]
        return evaluation.evaluate_engines(config, urls, tick, folder=folder)
