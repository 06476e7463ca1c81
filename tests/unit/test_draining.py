"""`publish.pause_mode: drain`: engines get new weights in turn, each when what ran on it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_async import training_record
from megatron_async.bank import Bank
from megatron_async.bank.requests import DRAIN, PUBLISHED
from megatron_async.config import ConfigError, check, load
from megatron_async.config.schema import PublishConfig
from megatron_async.rollout.agent_loop import EpisodeProgress, run_episode
from megatron_async.rollout.engines import with_engines
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.roster import DRAINING, SERVING, Engine, failed_key, read_roster, write_roster
from megatron_async.training import engine_group
from megatron_async.training.engine_group import EngineGroup
from megatron_async.training.publishing import WeightPublisher
from megatron_async.trajectory import SamplingParams, Trajectory
from sglang_bridge import EnginePool, Generation, SamplingOptions
from tests.unit.configs import write_config
from tests.unit.scripted_rollout import PlainChat, RuleSampler, ScriptedEnvironment
from tests.unit.test_publish_to_those_left import Alone
from tools.scripted_endpoint import ScriptedEndpoint

TURN = 40


class Rule:
    """Says `TURN` tokens after every prompt."""

    def answer(self, prompt: list[int]) -> list[int]:
        return list(range(10, 10 + TURN))


@asynccontextmanager
async def engine(token_s: float = 0.005) -> AsyncIterator[tuple[ScriptedEndpoint, str]]:
    rule: Any = Rule()
    endpoint = ScriptedEndpoint(rule, token_s, 0.0, 4, 0)
    runner = web.AppRunner(endpoint.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield endpoint, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Policy:
    """Weights that are no weights: the scripted engines do not read them."""

    def save_hf(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[Bank]:
    with Bank.open(f"sqlite:///{tmp_path / 'bank.sqlite'}") as bank:
        yield bank


def publish(bank: Bank, run_path: Path, drain_s: float, version: int = 1) -> EngineGroup:
    """What the trainer does, on a thread of its own."""
    config = PublishConfig(pause_mode="drain", transport="disk", verify="off", drain_s=drain_s, deadline_s=20.0)
    group, policy, control = EngineGroup(config, bank, run_path), Policy(), Alone()
    publisher = WeightPublisher(config, policy, control, group, run_path / "published")  # type: ignore[arg-type]
    try:
        publisher.publish(version)
    finally:
        group.close()
    return group


async def follow_drain(bank: Bank, run_path: Path, engines: list[Engine], seen: set[str]) -> None:
    """The launcher's part: what the trainer wants idle is taken off the engines that serve."""
    while True:
        drained = set((bank.get_state(DRAIN) or "").split())
        seen |= drained
        write_roster(run_path, [
            Engine(e.index, e.url, 0, DRAINING if e.name in drained else SERVING) for e in engines
        ])  # fmt: skip
        await asyncio.sleep(0.05)


async def agents(pool: EnginePool, until: Callable[[], bool], answers: list[Generation]) -> None:
    """Eight agents whose next turn accepts no weights older than their last one's."""

    async def agent() -> None:
        newest = 0
        while not until():
            answer = await pool.generate([1, 2, 3], SamplingOptions(max_new_tokens=100), min_version=newest)
            newest = answer.spans[-1].version
            answers.append(answer)

    await asyncio.gather(*(agent() for _ in range(8)))


def test_nothing_is_interrupted_and_no_agent_goes_back(tmp_path: Path, bank: Bank) -> None:
    """Two engines under load; every answer is of one version, and agents never go back to older weights."""
    answers: list[Generation] = []
    turns: set[str] = set()
    (tmp_path / training_record.FILE).write_text("what the run is trained on")

    async def scenario() -> tuple[int, int]:
        async with engine() as (one, a), engine() as (two, b), EnginePool([a, b], patience_s=20.0) as pool:
            engines = [Engine(0, a), Engine(1, b)]
            write_roster(tmp_path, engines)
            launcher = asyncio.create_task(follow_drain(bank, tmp_path, engines, turns))
            trainer = asyncio.create_task(asyncio.to_thread(publish, bank, tmp_path, 60.0))
            await with_engines(pool, tmp_path, agents(pool, trainer.done, answers))
            await trainer
            launcher.cancel()
            return one.version, two.version

    assert asyncio.run(scenario()) == (1, 1)
    assert turns == {"0.0", "1.0"}
    (published,) = (tmp_path / "published").glob(f"*/{training_record.FILE}")
    assert published.read_text() == "what the run is trained on"
    assert (bank.get_state(PUBLISHED), bank.get_state(DRAIN)) == ("1", "")
    assert {span.version for answer in answers for span in answer.spans} == {0, 1}
    assert [answer for answer in answers if len(answer.spans) > 1 or len(answer.output_ids) != TURN] == []


def test_what_runs_beyond_the_deadline_goes_on_under_the_new_weights(tmp_path: Path, bank: Bank) -> None:
    async def scenario() -> Generation:
        async with engine(token_s=0.1) as (endpoint, url), EnginePool([url]) as pool:
            write_roster(tmp_path, [Engine(0, url)])
            running = asyncio.create_task(pool.generate([1, 2, 3], SamplingOptions(max_new_tokens=100)))
            while endpoint.tokens == 0:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(publish, bank, tmp_path, 0.3)
            return await running

    answer = asyncio.run(scenario())
    assert [span.version for span in answer.spans] == [0, 1]
    assert len(answer.output_ids) == TURN


def test_an_engine_that_is_gone_when_its_turn_comes_is_left_out(
    tmp_path: Path, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_group, "_IDLE_S", 0.2)

    async def scenario() -> int:
        async with engine() as (endpoint, url):
            write_roster(tmp_path, [Engine(0, "http://127.0.0.1:9"), Engine(1, url)])
            await asyncio.to_thread(publish, bank, tmp_path, 5.0)
            return endpoint.version

    assert asyncio.run(scenario()) == 1
    assert "count running requests" in (bank.get_state(failed_key("0.0")) or "")
    assert (bank.get_state(PUBLISHED), bank.get_state(DRAIN)) == ("1", "")


def test_a_trainer_that_was_killed_over_it_leaves_nothing_drained(tmp_path: Path, bank: Bank) -> None:
    bank.set_state(DRAIN, "0.0")
    write_roster(tmp_path, [Engine(0, "http://127.0.0.1:9")])
    EngineGroup(PublishConfig(pause_mode="drain"), bank, tmp_path).close()
    assert bank.get_state(DRAIN) == ""
    assert [each.serves for each in read_roster(tmp_path)] == [True]


def test_a_request_waits_for_new_enough_weights_and_keeps_nobody_waiting() -> None:
    async def scenario() -> tuple[int, int]:
        async with engine(token_s=0.001) as (endpoint, url), EnginePool([url]) as pool:
            options = SamplingOptions(max_new_tokens=100)
            picky = asyncio.create_task(pool.generate([1, 2, 3], options, min_version=1))
            easy = await asyncio.wait_for(pool.generate([1, 2, 3], options), 30)
            assert not picky.done()
            endpoint.version = 1
            answer = await asyncio.wait_for(picky, 30)
            return easy.spans[0].version, answer.spans[0].version

    assert asyncio.run(scenario()) == (0, 1)


@pytest.mark.parametrize(
    ("mixed", "lost", "expected"), [(True, (), [0, 3]), (True, (3,), [0, 0]), (False, (), [0, 0])]
)
def test_a_turn_asks_for_no_older_weights_than_the_one_before(
    mixed: bool, lost: tuple[int, ...], expected: list[int]
) -> None:
    """Unless a resume of the trainer left those behind: no engine will hold them again."""
    asked: list[int] = []

    class Noting(RuleSampler):
        async def generate(self, *args: Any, **options: Any) -> Generation:
            asked.append(options["min_version"])
            return await super().generate(*args, **options)

    limits = EpisodeLimits(
        max_turns=2, max_tokens=100, turn_deadline_s=30, trajectory_deadline_s=60, mixed_versions=mixed
    )
    trajectory = Trajectory("t", "g", "p", SamplingParams(max_new_tokens=20), {})
    progress, environment = EpisodeProgress(lost=lambda version: version in lost), ScriptedEnvironment(turns=2)
    asyncio.run(run_episode(Noting(version=3), PlainChat(), environment, trajectory, limits, progress))
    assert asked == expected


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engines": {"count": 1}}, r"publish.drain_at_once: 1 of engines.count 1 .* start more engines"),
        ({"publish": {"drain_at_once": 2}}, "publish.drain_at_once: 2 of engines.count 2"),
        ({"publish": {"drain_s": 4000.0}, "trainer": {"deadline_s": 60.0}}, "drain_s: 4000 s .* trainer.deadline_s"),
        ({"engines": {"count": 2, "router": True}}, "drain needs to choose the engine .* engines.router to false"),
        ({"objective": {"anchor": "interrupt"}}, "publish.pause_mode to retract or abort"),
    ],
)
def test_where_it_cannot_work_it_is_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    whole = {"engines": {"count": 2}, **sections}
    whole["publish"] = {"pause_mode": "drain", **sections.get("publish", {})}
    with pytest.raises(ConfigError, match=message):
        check(load(write_config(tmp_path, **whole)))


def test_with_two_engines_it_is_accepted(tmp_path: Path) -> None:
    config = load(write_config(tmp_path, engines={"count": 2}, publish={"pause_mode": "drain"}))
    assert not any("drain" in warning for warning in check(config))
    assert EpisodeLimits.from_config(config).mixed_versions
