"""The tasks of a configuration, built before anything is started, so that what is wrong with them is said at once.

Invariant: whatever a configuration's environment refuses is a `UserError` here.
"""

from __future__ import annotations

from megatron_async.config.schema import RunConfig
from megatron_async.credentials import hidden_credentials
from megatron_async.errors import MissingHere, UserError
from megatron_async.rollout.chat_endpoint import KeyNotSet
from megatron_async.rollout.environments import build_task_source
from megatron_async.rollout.environments.base import Split, TaskSource


def heldout_tasks(config: RunConfig) -> TaskSource:
    """The tasks of evaluations. Raises UserError for an environment or an option of it that does not exist, and where
    it holds out fewer tasks than are to be evaluated."""
    heldout = _tasks(config, "heldout")
    with hidden_credentials(config.environment):  # a size may be computed by the environment's code
        size = heldout.size
    if size is not None and size < config.evaluation.tasks:
        raise UserError(
            f"evaluation.tasks: {config.evaluation.tasks}, but environment {config.environment.name} holds out "
            f"{size}; lower it"
        )
    return heldout


def training_tasks(config: RunConfig) -> TaskSource:
    """The tasks of training. Raises UserError for an environment or an option of it that does not exist, and where the
    environment refuses to train on what the options choose."""
    return _tasks(config, "train")


def _tasks(config: RunConfig, split: Split) -> TaskSource:
    try:
        return build_task_source(config.environment, split, config.seed)
    except KeyNotSet as error:
        raise MissingHere(f"environment: {error}") from error
    except ValueError as error:
        raise UserError(f"environment: {error}") from error
    except ModuleNotFoundError as error:
        raise MissingHere(
            f"environment: {config.environment.name} needs the module {error.name}, which this Python does not find; "
            "install it, or put its folder on PYTHONPATH"
        ) from error
