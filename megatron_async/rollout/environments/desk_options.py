"""The service desk from its options: one policy, or a schedule of policies.

    policy      a name in `desk_policy.POLICIES`, or the fields of a `DeskPolicy`
    pool        number of training tasks
    schedule    instead of both: a list of `{policy, tasks}` (see `desk_schedule`)
    stated      with a schedule: the prompt states the policy that judges
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_async.rollout.environments.base import Split
from megatron_async.rollout.environments.desk import TRAIN_TASKS, DeskTasks
from megatron_async.rollout.environments.desk_policy import policy_from
from megatron_async.rollout.environments.desk_schedule import ScheduledDeskTasks, parse_schedule


def build(options: Mapping[str, Any], split: Split, seed: int) -> DeskTasks | ScheduledDeskTasks:
    """Tasks of one split; ValueError for options that are unknown or contradict each other."""
    unknown = sorted(set(options) - {"policy", "pool", "schedule", "stated"})
    if unknown:
        raise ValueError(
            f"unknown options of the desk environment: {', '.join(unknown)}. Known: policy, pool, schedule, stated"
        )
    if "schedule" not in options:
        if "stated" in options:
            raise ValueError(
                "desk: the option stated belongs to a schedule; without one the policy is stated"
            )
        pool = options.get("pool", TRAIN_TASKS)
        if not isinstance(pool, int) or not 1 <= pool <= TRAIN_TASKS:
            raise ValueError(f"desk: pool is {pool!r}; it is a number of tasks from 1 to {TRAIN_TASKS}")
        return DeskTasks(split, policy_from(options.get("policy", "cancel_allowed")), seed, pool)
    if "policy" in options or "pool" in options:
        raise ValueError("desk: give either policy (and pool) or schedule, whose phases name their policies")
    return ScheduledDeskTasks(
        split, parse_schedule(options["schedule"]), seed, bool(options.get("stated", True))
    )
