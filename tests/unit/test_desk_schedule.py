"""A desk whose policy changes: phases by task number, judged and stated as configured."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_async.config.schema import EnvironmentConfig
from megatron_async.rollout.environments import Split, TaskSource, build_task_source
from megatron_async.rollout.environments.desk_policy import POLICIES
from megatron_async.rollout.prompts import PromptStream

SCHEDULE = [
    {"policy": "cancel_allowed", "tasks": 3},
    {"policy": "return_only", "tasks": 2},
    {"policy": "ask_first"},
]


def source(split: Split = "train", **options: Any) -> TaskSource:
    return build_task_source(EnvironmentConfig("desk", {"schedule": SCHEDULE, **options}), split, seed=5)


def system_prompt(tasks: TaskSource, index: int) -> str:
    return asyncio.run(tasks.environment(tasks.task(index)).reset()).messages[0].content


def test_phases_follow_the_order_in_which_prompts_are_issued() -> None:
    stream = PromptStream(source(), seed=9)
    tasks = [stream.task(cursor) for cursor in range(8)]
    assert [task.data["phase"] for task in tasks] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [task.data["policy"] for task in tasks[2:6]] == [
        POLICIES[name].to_json() for name in ("cancel_allowed", "return_only", "return_only", "ask_first")
    ]
    assert len({task.data["number"] for task in tasks}) == 8


def test_a_schedule_that_ends_begins_anew() -> None:
    tasks = source(schedule=[{"policy": "cancel_allowed", "tasks": 2}, {"policy": "return_only", "tasks": 1}])
    assert [tasks.task(index).data["phase"] for index in range(7)] == [0, 0, 1, 0, 0, 1, 0]


def test_the_prompt_states_what_judges_unless_told_otherwise() -> None:
    assert system_prompt(source(), 3) == POLICIES["return_only"].text()
    silent = source(stated=False)
    assert system_prompt(silent, 3) == POLICIES["cancel_allowed"].text()
    environment = silent.environment(silent.task(3))
    assert environment.task.policy == POLICIES["return_only"]  # type: ignore[attr-defined]


def test_held_out_tasks_are_judged_by_the_last_phase() -> None:
    tasks = source("heldout")
    assert tasks.size is not None
    assert {tasks.task(index).data["phase"] for index in range(5)} == {2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": []}, "expected a list"),
        ({"schedule": [{"tasks": 3}]}, "give policy and tasks"),
        ({"schedule": [{"policy": "ask_first"}, {"policy": "return_only"}]}, "phase 0 of 2 needs tasks"),
        ({"schedule": [{"policy": "ask_first", "tasks": 0}]}, "at least 1"),
        ({"policy": "ask_first"}, r"either policy \(and pool\) or schedule"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source(**options)


def test_a_small_pool_brings_its_tasks_back() -> None:
    tasks = build_task_source(EnvironmentConfig("desk", {"pool": 5}), "train", seed=5)
    stream = PromptStream(tasks, seed=9)
    epochs = [[stream.task(cursor).task_id for cursor in range(start, start + 5)] for start in (0, 5)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == 5
    with pytest.raises(ValueError, match="pool is 0"):
        build_task_source(EnvironmentConfig("desk", {"pool": 0}), "train", seed=5)
