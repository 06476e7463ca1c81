"""DAPO's dynamic sampling: groups whose rewards are all equal make room for later ones, without losing count."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async.advantages.estimator import informative_groups
from megatron_async.bank import Bank, Filtered, State
from megatron_async.config.schema import BatchConfig
from megatron_async.rollout.admission import Admission, InPlay
from megatron_async.rollout.environments.base import Task
from megatron_async.training.metrics import filter_metrics
from megatron_async.trajectory import Trajectory
from tests.bank_support import collect, states
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.scripted_rollout import ScriptedEnvironment, ScriptedSource
from tests.unit.test_rollout_controller import make_config, open_bank, play


@pytest.fixture
def bank(sqlite_url: str) -> Iterator[Bank]:
    with Bank.open(sqlite_url) as opened:
        yield opened


def collect_rewards(bank: Bank, version: int = 0, **rewards: tuple[float, ...]) -> None:
    """A group per keyword with a member for each reward, oldest first."""
    for group, values in rewards.items():
        for number, reward in enumerate(values):
            collect(bank, f"{group}.{number}", group, version, reward=reward)


def groups_of(batch: list[Trajectory] | None) -> list[str] | None:
    return None if batch is None else list(dict.fromkeys(t.group_id for t in batch))


def test_groups_without_variance_are_filtered_and_later_ones_take_their_place(bank: Bank, sqlite_url: str) -> None:
    collect_rewards(bank, a=(1, 1), b=(0, 1), c=(0, 0), d=(1, 0), e=(0.5, 0.5))
    batch = bank.take_batch(0, 2, 2, 0, max_filtered=9)
    assert groups_of(batch) == ["b", "d"]
    found = states(sqlite_url)
    assert {found[name] for name in ("a.0", "a.1", "c.0", "c.1")} == {"filtered"}
    assert found["e.0"] == "finished"  # the batch was full before it was looked at
    assert bank.filtered(0) == Filtered(groups=2, reward_sum=1.0)
    assert bank.filtered(0).reward_mean == 0.5
    assert bank.filtered(1) == Filtered()


def test_the_filter_leaves_exactly_the_groups_that_the_estimators_call_informative(bank: Bank) -> None:
    rewards = {"a": (1.0, 1.0), "b": (0.1, 0.1), "c": (0.1, 0.1 + 1e-12), "d": (-1.0, 1.0), "e": (0.0, -0.0)}
    collect_rewards(bank, **rewards)
    flat = [value for values in rewards.values() for value in values]
    expected = informative_groups(flat, [name for name in rewards for _ in (0, 1)])
    assert groups_of(bank.take_batch(0, 2, 2, 0, max_filtered=9)) == sorted(expected) == ["c", "d"]


def test_without_a_cap_given_groups_are_taken_as_they_come(bank: Bank) -> None:
    collect_rewards(bank, a=(1, 1), b=(0, 1))
    assert groups_of(bank.take_batch(0, 2, 2, 0)) == ["a", "b"]
    assert bank.filtered(0) == Filtered()


def test_an_endless_stream_of_equal_rewards_ends_at_the_cap_over_calls_and_restarts(
    bank: Bank, sqlite_url: str
) -> None:
    """Field bug 34."""
    collect_rewards(bank, a=(1, 1), b=(1, 1))
    assert bank.take_batch(0, 2, 2, 0, max_filtered=3) is None  # both filtered, nothing is left
    with Bank.open(sqlite_url) as restarted:
        restarted.rollback_uncommitted()
        collect_rewards(restarted, c=(1, 1), d=(1, 1), e=(1, 1))
        batch = restarted.take_batch(0, 2, 2, 0, max_filtered=3)
        assert groups_of(batch) == ["d", "e"]  # c was the third; then they are taken as they come
        assert restarted.filtered(0).groups == 3
        restarted.commit_step(0, 0, 0)
        collect_rewards(restarted, f=(1, 1), g=(0, 1))
        assert groups_of(restarted.take_batch(1, 1, 2, 0, max_filtered=3)) == ["g"]  # each step has its own


def test_filtered_members_give_their_places_back(bank: Bank) -> None:
    """Field bug 34: with bound 0 nothing could start any more if filtered groups still counted."""
    collect_rewards(bank, a=(1, 1), b=(0, 1))
    admission = Admission(bound=0, groups=2, group_size=2)

    def room() -> int:
        counts = bank.counts()
        waiting = counts[State.FINISHED] + counts[State.RESERVED]
        return admission.room(InPlay(0, 0, waiting, counts[State.RUNNING]))

    assert room() == 0
    assert bank.take_batch(0, 2, 2, 0, max_filtered=4) is None
    assert room() == 1
    assert bank.admitted().accepted == 2


def test_what_is_too_old_is_stale_and_not_filtered(bank: Bank, sqlite_url: str) -> None:
    bank.record_version(1, 0)
    collect_rewards(bank, version=0, old=(1, 1))
    collect_rewards(bank, version=1, a=(0, 0), b=(0, 1))
    batch = bank.take_batch(0, 1, 2, min_updates=1, max_filtered=5)
    assert groups_of(batch) == ["b"]
    assert min(int(t.min_version or 0) for t in batch or []) == 1
    assert Counter(states(sqlite_url).values()) == {"stale": 2, "filtered": 2, "reserved": 2}
    assert bank.filtered(0).groups == 1


def test_a_resume_takes_the_same_batch_and_nothing_filtered_comes_back(bank: Bank, sqlite_url: str) -> None:
    collect_rewards(bank, a=(1, 1), b=(0, 1), c=(0, 1))
    first = bank.take_batch(0, 1, 2, 0, max_filtered=5)
    bank.rollback_uncommitted()
    assert bank.take_batch(0, 1, 2, 0, max_filtered=5) == first
    bank.record_version(1, 0, 0)
    bank.commit_step(0, 0, 1)
    bank.rollback_uncommitted(checkpoint_step=-1)  # a checkpoint from before the step
    assert bank.take_batch(0, 1, 2, min_updates=1, max_filtered=0) == first
    assert {name for name, state in states(sqlite_url).items() if state == "filtered"} == {"a.0", "a.1"}
    assert bank.filtered(0).groups == 1  # so that the step's metrics say the same again


def test_a_closed_group_of_one_has_no_variance(bank: Bank, sqlite_url: str) -> None:
    collect_rewards(bank, a=(1,), b=(0, 1))
    bank.close_group("a", keep=True)
    assert groups_of(bank.take_batch(0, 1, 2, 0, max_filtered=1)) == ["b"]
    assert states(sqlite_url)["a.0"] == "filtered"


def test_metrics_name_the_filtered_and_whether_the_cap_was_reached() -> None:
    cut = BatchConfig(groups=6, group_size=2, max_filtered_groups=4)
    assert filter_metrics(Filtered(), cut) == {
        "batch/filtered_groups": 0, "batch/filtered_rate": 0.0, "batch/filter_exhausted": 0.0
    }  # fmt: skip
    found = filter_metrics(Filtered(4, 3.0), cut)
    assert found["batch/filtered_rate"] == 0.4
    assert (found["batch/filter_exhausted"], found["batch/filtered_reward_mean"]) == (1.0, 0.75)


@pytest.mark.parametrize("bound", [0, 1])
def test_rollout_fills_the_batches_with_groups_that_say_something(tmp_path: Path, bound: int) -> None:
    """Two of three prompts are always solved. Every batch must differ within its groups, within the staleness bound."""

    async def scenario() -> None:
        config = make_config(
            tmp_path, max_staleness=bound, turn_deadline_s=60.0, trajectory_deadline_s=60.0
        )
        config = replace(config, batch=replace(config.batch, max_filtered_groups=20))
        episodes: Counter[str] = Counter()

        def make(task: Task) -> ScriptedEnvironment:
            episodes[task.task_id] += 1
            varies = task.data["index"] % 3 == 0
            return ScriptedEnvironment(outcome=float(episodes[task.task_id] % 2) if varies else 1.0)

        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                _, trainer = await play(config, bank, engine, lambda c, t: t.train(3), ScriptedSource(make))
            for batch in trainer.batches:
                groups = [t.group_id for t in batch]
                rewards = [t.required_reward() for t in batch]
                assert informative_groups(rewards, groups) == set(groups)
            trained = [t.trajectory_id for batch in trainer.batches for t in batch]
            assert len(trained) == len(set(trained)) == 3 * config.batch.trajectories
            assert max(trainer.gaps) <= bound
            assert bank.counts()[State.FILTERED] >= 3 * config.batch.trajectories
            assert bank.counts()[State.STALE] == 0
            assert all(0 < bank.filtered(step).groups <= 20 for step in range(3))

    asyncio.run(scenario())
