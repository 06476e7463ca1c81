"""Publishing survives an engine that dies in the middle: the others get the version, the late one later (bug 37)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.bank import Bank
from megatron_async.bank.requests import PUBLISHED
from megatron_async.config.schema import BatchConfig, PublishConfig, RolloutConfig
from megatron_async.roster import LATE, SERVING, Engine, failed_key, write_roster
from megatron_async.training import engine_group
from megatron_async.training.engine_group import EngineGroup
from megatron_async.training.publishing import WeightPublisher
from sglang_bridge import PublishError
from sglang_bridge.publisher import PublishReport

A, B = "http://a:1", "http://b:1"


@dataclass
class World:
    """What the engines do when they are published to, and what reached them."""

    broken: set[str] = field(default_factory=set)
    nobodys_fault: bool = False
    held: dict[str, int] = field(default_factory=dict)
    publications: list[tuple[int, list[str]]] = field(default_factory=list)
    connections: list[list[str]] = field(default_factory=list)
    released: int = 0

    def publisher(self, urls: list[str], **options: Any) -> Publisher:
        return Publisher(self, list(urls))


@dataclass
class Publisher:
    """Stands for the bridge's publisher, whose own behaviour has its own tests."""

    world: World
    urls: list[str]

    def follow(self, urls: list[str]) -> None:
        self.urls = list(urls)

    def connect(self) -> None:
        self._touch("reach")
        self.world.connections.append(self.urls)

    def publish(self, version: int, tensors: Iterator[Any], **proofs: Any) -> PublishReport:
        self.world.publications.append((version, list(self.urls)))
        next(tensors)
        self._touch("load a bucket")
        list(tensors)
        self.world.held |= dict.fromkeys(self.urls, version)
        return PublishReport(version, 0.1, 0.1, 0.1, 10, 1, 0, 0, "")

    def hold(self) -> float:
        self._touch("pause")
        return 5.0

    def release(self) -> None:
        self._touch("resume")
        self.world.released += 1

    def close(self) -> None:
        self.urls = []

    def _touch(self, step: str) -> None:
        if self.world.nobodys_fault:
            raise PublishError("the stream of weights is empty")
        bad = [url for url in self.urls if url in self.world.broken]
        if bad:
            raise PublishError(f"could not {step} on {len(bad)} of {len(self.urls)} engines", urls=tuple(bad))


class Alone:
    """One rank."""

    def json_from_rank_zero(self, produce: Callable[[], Any]) -> Any:
        return json.loads(json.dumps(produce()))


@dataclass
class Policy:
    """Counts how often the weights were exported to their end: other ranks are in the same collective."""

    exports: int = 0
    whole: int = 0

    def export(self) -> Iterator[tuple[str, Any]]:
        self.exports += 1
        yield from [("a", 0), ("b", 1)]
        self.whole += 1


@dataclass
class Run:
    path: Path
    bank: Bank
    world: World
    policy: Policy
    engines: EngineGroup
    publisher: WeightPublisher

    def roster(self, *engines: Engine) -> None:
        write_roster(self.path, engines)

    def published(self) -> str | None:
        return self.bank.get_state(PUBLISHED)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    world = World()
    monkeypatch.setattr(engine_group, "Publisher", world.publisher)
    monkeypatch.setattr(engine_group, "_LOOK_S", 0.0)
    write_roster(tmp_path, [Engine(0, A), Engine(1, B)])
    config = PublishConfig(verify="off")
    with Bank.open(f"sqlite:///{tmp_path / 'bank.sqlite'}") as bank:
        engines = EngineGroup(config, bank, tmp_path)
        policy: Any = Policy()
        publisher = WeightPublisher(config, policy, Alone(), engines, tmp_path / "published")  # type: ignore[arg-type]
        yield Run(tmp_path, bank, world, policy, engines, publisher)


def test_the_others_get_the_version_and_the_broken_one_is_reported(run: Run) -> None:
    run.world.broken = {B}
    published = run.publisher.publish(1)
    assert (published.version, published.bytes) == (1, 10)
    assert run.world.publications == [(1, [A, B]), (1, [A])]
    assert run.world.held == {A: 1}
    assert run.policy.exports == run.policy.whole == 2
    assert run.published() == "1"
    assert "could not load a bucket" in (run.bank.get_state(failed_key("1.0")) or "")
    assert not run.bank.get_state(failed_key("0.0"))


def test_an_engine_that_came_back_catches_up_alone(run: Run) -> None:
    run.world.broken = {B}
    run.publisher.publish(1)
    run.roster(Engine(0, A))
    assert not run.engines.anyone_late()
    run.world.broken, again = set(), "http://b:2"
    run.roster(Engine(0, A), Engine(1, again, 1, LATE))
    assert run.engines.anyone_late()
    run.publisher.catch_up(1)
    assert run.world.publications[-1] == (1, [again])
    assert run.world.held == {A: 1, again: 1}
    assert not run.engines.anyone_late()
    run.publisher.publish(2)
    assert run.world.publications[-1] == (2, [A, again])


def test_one_that_fails_again_while_catching_up_is_reported_again(run: Run) -> None:
    run.publisher.publish(1)
    run.roster(Engine(0, A), Engine(1, "http://b:2", 1, LATE))
    run.world.broken = {"http://b:2"}
    assert run.engines.anyone_late()
    run.publisher.catch_up(1)
    assert run.bank.get_state(failed_key("1.1"))
    assert not run.engines.anyone_late()  # not until it is another one
    assert run.policy.exports == run.policy.whole


def test_with_no_engine_left_the_run_goes_on_and_whoever_comes_back_is_late(run: Run) -> None:
    run.world.broken = {A, B}
    published = run.publisher.publish(3)
    assert (published.bytes, run.published()) == (0, "3")
    run.world.broken = set()
    run.roster(Engine(0, "http://a:2", 1, LATE))
    assert run.engines.anyone_late()
    run.publisher.catch_up(3)
    assert run.world.held == {"http://a:2": 3}


def test_before_anything_was_published_nobody_is_late(run: Run) -> None:
    run.roster(Engine(0, A), Engine(1, "http://b:2", 1, SERVING))
    assert not run.engines.anyone_late()


def test_an_error_that_blames_no_engine_is_raised(run: Run) -> None:
    run.world.nobodys_fault = True
    with pytest.raises(PublishError, match="the stream of weights is empty"):
        run.publisher.publish(1)
    assert run.published() is None
    assert run.policy.whole == 1


def test_holding_and_connecting_leave_out_what_does_not_answer(run: Run) -> None:
    run.world.broken = {A}
    run.engines.connect()
    assert run.world.connections == [[B]]
    assert run.engines.hold() == 5.0
    run.engines.release()
    assert run.world.released == 1
    run.world.broken = {A, B}
    assert run.engines.hold() > 5.0  # nobody samples: everything stands still now
    run.engines.release()
    assert run.world.released == 1


def test_the_feed_lets_the_ranks_catch_engines_up_while_they_wait(run: Run) -> None:
    from megatron_async.training.batch import BatchFeed

    caught_up: list[int] = []
    answers = iter([True, False, True])
    config: Any = SimpleNamespace(
        batch=BatchConfig(groups=1, group_size=2), trainer=SimpleNamespace(deadline_s=600.0),
        rollout=RolloutConfig(poll_s=0.0),
    )  # fmt: skip
    control: Any = SimpleNamespace(from_rank_zero=lambda produce: produce())
    feed = BatchFeed(
        config, control, run.bank, lambda what: None, lambda: next(answers), lambda: caught_up.append(1)
    )
    with pytest.raises(StopIteration):  # the fourth look: nothing else ends the wait
        feed.take(0, 0)
    assert len(caught_up) == 2
