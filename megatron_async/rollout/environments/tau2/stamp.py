"""What must be said with every number about tau2 tasks: which benchmark, and everything that is not the benchmark's.

Invariant: whatever changes what an episode is, and with it what a success rate means (own files, a limit that is not
the benchmark's, another reward basis, a user that is no model), stands in the stamp of every reward and report, and
among the `labels`. What is as the benchmark has it is in neither, except for the keys that every stamp has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_async.labels import TRAINED_ON
from megatron_async.rollout.environments.base import Split
from megatron_async.rollout.environments.tau2.options import Tau2Options

_FILES = ("task_file", "heldout_task_file", "database_file", "user_database_file", "system_prompt_file")
_LIMITS = ("max_steps", "max_errors", "enforce_communication_protocol")
_ALWAYS = {"prompt": "benchmark", "reward_policy": "official"}
_DEFAULTS = {option.name: option.default for option in fields(Tau2Options)}
_DIGEST = 12


def stamp(options: Tau2Options, split: Split, benchmark: str, shared: int) -> dict[str, Any]:
    """JSON for rewards and reports. benchmark: its name and version. shared: training tasks that are evaluation tasks.

    Reads own files whole, for their digest. Raises ValueError for one that cannot be read.
    """
    own_prompt = options.system_prompt_file or options.tool_descriptions == "short"
    result: dict[str, Any] = {
        "benchmark": benchmark,
        "domain": options.domain,
        "solo": options.solo,
        "split": options.train_split if split == "train" else options.heldout_split,
        "user": "none" if options.solo else options.user.kind,
        "reward_policy": options.reward_basis,
        "prompt": "own" if own_prompt else "benchmark",
    }
    result |= {name: digest(path) for name in _files_of(options, split) if (path := getattr(options, name))}
    result |= {name: value for name in _LIMITS if (value := getattr(options, name)) != _DEFAULTS[name]}
    if options.tool_descriptions != _DEFAULTS["tool_descriptions"]:
        result["tool_descriptions"] = options.tool_descriptions
    if shared:
        result[TRAINED_ON] = shared
    return result


def labels(stamp: Mapping[str, Any]) -> dict[str, str]:
    """What in a stamp is not the benchmark's; empty when a number can be compared with others."""
    found = {name: str(stamp[name]) for name, usual in _ALWAYS.items() if stamp[name] != usual}
    if stamp["user"] in ("scripted", "recorded"):
        found["user"] = stamp["user"]
    unusual = (*_FILES, *_LIMITS, "tool_descriptions", TRAINED_ON)
    return found | {name: str(stamp[name]) for name in unusual if name in stamp}


def digest(path: str) -> str:
    """A file's name and the beginning of the SHA-256 of its content, e.g. "mine.json sha256:0a1b2c3d4e5f"."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"tau2: {path} cannot be read ({error})") from error
    return f"{Path(path).name} sha256:{hashlib.sha256(content).hexdigest()[:_DIGEST]}"


def _files_of(options: Tau2Options, split: Split) -> tuple[str, ...]:
    """The files that the episodes of a split are made of: held-out tasks of their own replace the others."""
    if split == "train":
        return tuple(name for name in _FILES if name != "heldout_task_file")
    if options.heldout_task_file:
        return tuple(name for name in _FILES if name != "task_file")
    return _FILES
