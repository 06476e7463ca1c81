"""Environments by name: `build_task_source` turns the `environment` section of a configuration into tasks.

A name is one of `ENVIRONMENTS`, or `package.module:factory` for an environment of your own. A factory is called as
`factory(options, split, seed)` and returns a `TaskSource`; it raises `ValueError` for an option it does not know.
Modules are imported only when their environment is asked for, so an environment's extra dependencies stay optional, and
what they run on import sees no credentials (`credentials`).
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_async.credentials import hidden_credentials
from megatron_async.rollout.environments.base import (
    AssistantTurn,
    Environment,
    EnvironmentFailure,
    Message,
    Split,
    Start,
    Step,
    Task,
    TaskSource,
    ToolCall,
)

if TYPE_CHECKING:
    from megatron_async.config.schema import EnvironmentConfig
    from megatron_async.rollout.chat import ChatFormat

__all__ = [
    "ENVIRONMENTS",
    "AssistantTurn",
    "Environment",
    "EnvironmentFailure",
    "Message",
    "Split",
    "Start",
    "Step",
    "Task",
    "TaskSource",
    "ToolCall",
    "build_demonstrations",
    "build_task_source",
]

Factory = Callable[[Mapping[str, Any], Split, int], TaskSource]

ENVIRONMENTS: dict[str, str] = {
    "bfcl": "megatron_async.rollout.environments.bfcl:build",
    "desk": "megatron_async.rollout.environments.desk_options:build",
    "tau2": "megatron_async.rollout.environments.tau2:build",
}


DEMONSTRATIONS: dict[str, str] = {
    "desk": "megatron_async.rollout.environments.desk_demonstrations:build",
    "tau2": "megatron_async.rollout.environments.tau2.demonstrations:build",
}
"""Environments that can demonstrate their task for a warm start."""


def build_task_source(config: EnvironmentConfig, split: Split, seed: int) -> TaskSource:
    """The tasks of one split. `seed` shuffles which tasks a run sees; the splits are disjoint for every seed.

    Raises ValueError for an unknown name or split (listing the choices), and whatever the factory raises for options.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"unknown split {split!r}: use 'train' or 'heldout'")
    with hidden_credentials(config):
        return _factory(config.name)(config.options, split, seed)


def build_demonstrations(
    config: EnvironmentConfig, count: int, seed: int, chat: ChatFormat
) -> list[tuple[list[int], list[bool]]]:
    """`count` demonstrations as (token_ids, action_mask) pairs, written by `chat`.

    Raises ValueError for an environment that has no demonstrator.
    """
    target = DEMONSTRATIONS.get(config.name)
    if target is None:
        raise ValueError(
            f"environment {config.name!r} has no demonstrations; known: {sorted(DEMONSTRATIONS)}"
        )
    module, _, attribute = target.partition(":")
    with hidden_credentials(config):
        build = getattr(importlib.import_module(module), attribute)
        pairs: list[tuple[list[int], list[bool]]] = build(config.options, count, seed, chat)
    return pairs


def _factory(name: str) -> Factory:
    target = ENVIRONMENTS.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        near = difflib.get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown environment {name!r}{hint} Known: {', '.join(sorted(ENVIRONMENTS))}; "
            f"your own environment is written as package.module:factory"
        )
    factory: Factory = getattr(importlib.import_module(module), attribute)
    return factory
