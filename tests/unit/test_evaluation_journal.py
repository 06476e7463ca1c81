"""An interrupted evaluation goes on where it stopped, and never mixes conditions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_async.errors import UserError
from megatron_async.rollout.environments.base import EnvironmentFailure, Task
from megatron_async.rollout.evaluation import engine_player, evaluate
from megatron_async.rollout.evaluation_episode import EvaluatedEpisode
from megatron_async.rollout.evaluation_journal import EvaluationJournal
from megatron_async.rollout.evaluation_statistics import describe
from megatron_async.trajectory import SamplingParams
from tests.unit.scripted_rollout import PlainChat, RuleSampler, ScriptedEnvironment, ScriptedSource
from tests.unit.test_evaluation import LIMITS


class Crash(UserError):
    """Ends the evaluation: anything else that making an environment raises ends its own episode."""


def run(journal: EvaluationJournal, source: ScriptedSource, samples: int = 2) -> Any:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=20)
    play = engine_player(RuleSampler(), source, PlainChat(), sampling, LIMITS)
    return asyncio.run(evaluate(play, source, tasks=4, samples=samples, concurrency=1, journal=journal))


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


def test_each_conditions_have_episodes_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An evaluation under other conditions starts afresh and leaves the interrupted ones what they have."""
    for version in (3, 4):
        run(EvaluationJournal(tmp_path / "j", {"version": version}), ScriptedSource())
    third = EvaluationJournal(tmp_path / "j", {"version": 5})
    assert len(third) == 0
    with caplog.at_level("INFO"):
        third.tell()
    assert len(caplog.records) == 2
    assert all("an interrupted evaluation with 8 episodes" in record.message for record in caplog.records)
    third.clear()
    first = EvaluationJournal(tmp_path / "j", {"version": 3})
    assert len(first) == 8
    first.clear()
    assert len(EvaluationJournal(tmp_path / "j", {"version": 4})) == 8


def test_an_episode_survives_the_disk_unchanged(tmp_path: Path) -> None:
    journal = EvaluationJournal(tmp_path / "j", {})
    episode = EvaluatedEpisode(0.5, "max_turns", {"why": [1, "é"]}, True, 7, 3, (2, 4), 0.25)
    journal.save(1, 0, "b", episode)
    assert journal.load(1, 0, "b") == episode
    assert journal.load(1, 1, "b") is None


def test_failed_attempts_are_counted_also_those_before_an_interruption(tmp_path: Path) -> None:
    """Task 0 fails twice, is interrupted, fails once more and succeeds; task 1 always fails and is left out."""
    plays = {0: 0, 1: 0}

    def make(task: Task) -> ScriptedEnvironment:
        index = task.data["index"]
        plays[index] = plays.get(index, 0) + 1
        if index == 0 and plays[0] == 3:
            raise Crash
        fails = index == 1 or (index == 0 and plays[0] in (1, 2, 4))
        return ScriptedEnvironment(at={"reset": EnvironmentFailure("silent", "user_failure")} if fails else {})

    with pytest.raises(ExceptionGroup):
        run(EvaluationJournal(tmp_path / "j", {}), ScriptedSource(make), samples=1)
    result = run(EvaluationJournal(tmp_path / "j", {}), ScriptedSource(make), samples=1)
    assert result.failures == {"user_failure": 1} and result.tasks == 3
    assert result.failed_attempts == {"user_failure": 3 + 3} == result.stated()["failed_attempts"]
    assert "repeated or left out: user_failure 6." in describe(result)


def test_an_episode_of_another_task_is_played_again(tmp_path: Path) -> None:
    """The same conditions, but the source now has another task at that place."""
    journal = EvaluationJournal(tmp_path / "j", {})
    journal.save(1, 0, "b", EvaluatedEpisode(1.0, "done"))
    assert journal.load(1, 0, "c") is None
