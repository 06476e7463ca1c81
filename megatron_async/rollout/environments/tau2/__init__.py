"""tau2-bench: airline, retail and telecom agents on the benchmark's own code (extra `tau2`, see docs/tau2.md).

package       the benchmark found, checked and imported        database     records shared between episodes
domain        tasks, splits, cheap environments, gold states    episode      the orchestrator, step by step
users         endpoint, scripted, recorded                      reward       cached and official evaluators, judges
environment   what the agent loop plays                         report       results in the benchmark's own format
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_async.rollout.environments.base import Split, TaskSource


def build(options: Mapping[str, Any], split: Split, seed: int) -> TaskSource:
    """Factory of the environment registry; the benchmark is imported only here, or, with the option `python`, in a
    process of that interpreter.

    Raises Tau2NotInstalled when it is not installed, ValueError for options.
    """
    if options.get("python"):
        from megatron_async.rollout.environments.served.client import serve_tasks

        there = {name: value for name, value in options.items() if name != "python"}
        return serve_tasks(options["python"], f"{__name__}:build", there, split, seed)
    from megatron_async.rollout.environments.tau2.environment import build as build_tasks

    return build_tasks(options, split, seed)
