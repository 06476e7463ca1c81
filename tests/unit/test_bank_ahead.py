"""Looking at what waits to be trained without taking it, and the batch feed that offers it while it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.bank import Bank
from megatron_async.bank.requests import WRITE_DOWN, WRITTEN_DOWN
from megatron_async.config.schema import BatchConfig, RolloutConfig
from megatron_async.trajectory import Trajectory, VersionSpan
from tests.bank_support import collect, collect_group, running, states

PER_TRAJECTORY = 5  # tokens of one trajectory of bank_support


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'bank.sqlite'}"


@pytest.fixture
def bank(url: str) -> Iterator[Bank]:
    with Bank.open(url) as bank:
        yield bank


def waiting(bank: Bank, known: tuple[str, ...] = (), min_updates: int = 0, tokens: int = 1000) -> list[str]:
    return [t.trajectory_id for t in bank.list_waiting(known, min_updates, tokens)]


def test_finished_members_are_seen_before_their_group_is_complete(bank: Bank, url: str) -> None:
    collect(bank, "a.0", "a")
    bank.start_trajectory(running("a.1", "a"))
    collect_group(bank, "b")
    assert waiting(bank) == ["a.0", "b.0", "b.1"]
    assert waiting(bank, known=("b.0",)) == ["a.0", "b.1"]
    assert states(url) == {"a.0": "finished", "a.1": "running", "b.0": "finished", "b.1": "finished"}


def test_what_was_taken_or_is_too_old_is_not_seen(bank: Bank) -> None:
    collect_group(bank, "a")
    assert bank.take_batch(0, 1, 2, 0) is not None
    for version in (1, 2):
        bank.record_version(version, version - 1)
    collect(bank, "b.0", "b", version=1)
    collect(bank, "c.0", "c", version=2)
    assert waiting(bank, min_updates=2) == ["c.0"]
    assert waiting(bank) == ["b.0", "c.0"]


def test_no_more_tokens_than_asked_for_but_one_trajectory_at_least(bank: Bank) -> None:
    collect_group(bank, "a", size=3)
    assert waiting(bank, tokens=2 * PER_TRAJECTORY) == ["a.0", "a.1"]
    assert waiting(bank, tokens=1) == ["a.0"]


class Alone:
    """The control channel of a trainer with one rank."""

    def from_rank_zero(self, produce: Callable[[], bytes]) -> bytes:
        return produce()


def feed_over(bank: Bank, on_wait: Callable[[str], None]) -> Any:
    from megatron_async.training.batch import BatchFeed

    config = SimpleNamespace(
        rollout=RolloutConfig(max_staleness=0, poll_s=0.0),
        batch=BatchConfig(groups=1, group_size=2),
        trainer=SimpleNamespace(deadline_s=30.0, micro_batch_tokens=2 * PER_TRAJECTORY),
        layout=SimpleNamespace(data_parallel_size=1, context_parallel_size=1),
    )
    return BatchFeed(config, Alone(), bank, on_wait)  # type: ignore[arg-type]


def test_the_feed_offers_each_waiting_trajectory_once_until_the_batch_is_complete(bank: Bank) -> None:
    collect(bank, "a.0", "a")
    collect(bank, "b.0", "b")
    collect(bank, "c.0", "c")
    offered: list[list[str]] = []

    def work(trajectories: list[Trajectory]) -> None:
        offered.append([t.trajectory_id for t in trajectories])
        if len(offered) == 2:
            collect(bank, "b.1", "b")

    batch = feed_over(bank, lambda what: None).take(0, 0, work)
    assert offered == [["a.0", "b.0"], ["c.0"]]
    assert [t.trajectory_id for t in batch] == ["b.0", "b.1"]


def test_the_feed_forgets_what_went_stale(bank: Bank) -> None:
    bank.record_version(1, 0)
    collect_group(bank, "old", version=0)

    feed = feed_over(bank, lambda what: None)
    feed._offered = {"old.0", "old.1"}  # offered while an earlier batch was waited for
    collect_group(bank, "new", version=1)
    batch = feed.take(0, 1)
    assert [t.trajectory_id for t in batch] == ["new.0", "new.1"]
    assert feed._offered == set()


def test_without_idle_work_the_feed_only_waits(bank: Bank) -> None:
    collect(bank, "a.0", "a")
    looks: list[str] = []

    def on_wait(what: str) -> None:
        looks.append(what)
        if len(looks) == 3:
            collect(bank, "a.1", "a")

    batch = feed_over(bank, on_wait).take(0, 0)
    assert [t.trajectory_id for t in batch] == ["a.0", "a.1"]
    assert looks == ["batch: 0 of 1 groups"] * 3


def test_everything_a_version_has_sampled_last_is_found_whether_it_runs_or_waits(bank: Bank) -> None:
    bank.record_version(1, 0)
    collect(bank, "old", "a", version=0)
    collect(bank, "waits", "b", version=1)
    fresh, partial = running("fresh", "c"), running("partial", "d")
    bank.start_trajectories([fresh, partial])
    partial.append_action([4], [-0.5], [VersionSpan(1, 0, 1)])
    bank.checkpoint_trajectories([fresh, partial])
    collect_group(bank, "taken", version=1)
    assert bank.take_batch(0, 1, 2, 1) is not None
    assert [t.trajectory_id for t in bank.list_sampled_by(1)] == ["waits", "partial"]
    assert [t.trajectory_id for t in bank.list_sampled_by(0)] == ["old"]


def test_scores_are_kept_until_they_are_too_old(bank: Bank, url: str) -> None:
    bank.save_scores({"a": (3, b"aa"), "b": (4, b"bb")}, oldest=0)
    bank.save_scores({"b": (4, b"longer")}, oldest=4)
    with Bank.open(url) as again:
        assert again.load_scores() == {"b": (4, b"longer")}


class Engines:
    """Engines that are held, and a rollout that answers `answers_after` seconds later."""

    def __init__(self, bank: Bank, answers_after: float) -> None:
        self.bank, self.calls = bank, []
        self.answer = threading.Timer(answers_after, self.write_down)

    def write_down(self) -> None:
        assert self.calls == ["hold"]
        self.bank.set_state(WRITTEN_DOWN, self.bank.get_state(WRITE_DOWN) or "")

    def hold(self) -> float:
        self.calls.append("hold")
        self.answer.start()
        return time.time()

    def release(self) -> None:
        self.calls.append("release")


def interruption_over(bank: Bank, engines: Engines, deadline_s: float) -> Any:
    from megatron_async.training.interruption import Interruption

    config = SimpleNamespace(publish=SimpleNamespace(deadline_s=deadline_s))
    return Interruption(config, Alone(), bank, engines)  # type: ignore[arg-type]


def test_an_interruption_holds_the_engines_until_the_rollout_has_written_down(bank: Bank) -> None:
    collect(bank, "waits", "a")
    engines = Engines(bank, answers_after=0.3)
    interruption = interruption_over(bank, engines, deadline_s=30.0)
    assert [t.trajectory_id for t in interruption.collect(0)] == ["waits"]
    assert engines.calls == ["hold"]
    interruption.release()
    assert engines.calls[-1] == "release"
    interruption.release()
    assert engines.calls.count("release") == 1
    assert interruption.take_metrics().keys() == {
        "interrupt/collect_seconds", "interrupt/trajectories", "interrupt/paused_seconds",
    }  # fmt: skip


def test_a_rollout_that_does_not_answer_ends_the_wait_with_what_to_look_at(bank: Bank) -> None:
    from megatron_async.training.interruption import InterruptionDeadline

    engines = Engines(bank, answers_after=60)
    with pytest.raises(InterruptionDeadline, match=r"version 0.*0.1 s \(publish.deadline_s\).*rollout.log"):
        interruption_over(bank, engines, deadline_s=0.1).collect(0)
    engines.answer.cancel()
