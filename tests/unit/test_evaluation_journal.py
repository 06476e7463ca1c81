"""An interrupted evaluation goes on where it stopped, and never mixes conditions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_async.rollout.environments.base import Task
from megatron_async.rollout.evaluation import evaluate
from megatron_async.rollout.evaluation_journal import EvaluationJournal
from megatron_async.trajectory import SamplingParams
from tests.unit.scripted_rollout import PlainChat, RuleSampler, ScriptedEnvironment, ScriptedSource
from tests.unit.test_evaluation import LIMITS


class Crash(RuntimeError):
    pass


def run(journal: EvaluationJournal, source: ScriptedSource) -> Any:
    coroutine = evaluate(
        RuleSampler(),
        source,
        PlainChat(),
        tasks=4,
        samples=2,
        concurrency=1,
        sampling=SamplingParams(temperature=0.0, max_new_tokens=20),
        limits=LIMITS,
        journal=journal,
    )
    return asyncio.run(coroutine)


def test_episodes_that_are_known_are_not_played_again(tmp_path: Path) -> None:
    played: list[str] = []

    def make(task: Task) -> ScriptedEnvironment:
        played.append(task.task_id)
        if len(played) == 6:
            raise Crash
        return ScriptedEnvironment()

    conditions = {"version": 3}
    with pytest.raises(ExceptionGroup) as crash:
        run(EvaluationJournal(tmp_path / "j", conditions), ScriptedSource(make))
    assert crash.group_contains(Crash)
    again = EvaluationJournal(tmp_path / "j", conditions)
    assert len(again) == 5
    result = run(again, ScriptedSource(make))
    assert (len(played), result.episodes) == (6 + 3, 8)
    again.clear()
    assert not (tmp_path / "j").exists()


def test_other_conditions_start_afresh(tmp_path: Path) -> None:
    make = lambda task: ScriptedEnvironment()
    run(EvaluationJournal(tmp_path / "j", {"version": 3}), ScriptedSource(make))
    assert len(EvaluationJournal(tmp_path / "j", {"version": 3})) == 8
    assert len(EvaluationJournal(tmp_path / "j", {"version": 4})) == 0
