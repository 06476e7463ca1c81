"""Several rollout processes on one bank: they share prompts and room, and leave each other's work alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async.bank import Bank, State
from megatron_async.bank.requests import OLDEST
from megatron_async.config.schema import BankConfig, RunConfig
from megatron_async.errors import UserError
from megatron_async.rollout import controller as controllers
from megatron_async.rollout.controller import RolloutController
from megatron_async.rollout.environments.base import Task
from megatron_async.rollout.prompts import process_of
from sglang_bridge import EnginePool
from tests.bank_support import check_consistent, close_view, states
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.scripted_rollout import PlainChat, ScriptedEnvironment, ScriptedSource
from tests.unit.test_rollout_controller import Trainer, make_config


@pytest.fixture
def url(bank_url: str) -> Iterator[str]:
    yield bank_url
    check_consistent(bank_url)
    close_view(bank_url)


class Fleet:
    """Rollout processes of one bank in one event loop, each with a bank and a pool of its own."""

    def __init__(self, config: RunConfig, engine: ScriptedEngine, source: ScriptedSource) -> None:
        self.config, self.engine, self.source = config, engine, source
        self.controllers: dict[int, RolloutController] = {}
        self.runs: dict[int, asyncio.Task[object]] = {}
        self._banks = ExitStack()

    def start(self, process: int) -> asyncio.Task[object]:
        config = replace(self.config, rollout=replace(self.config.rollout, process=process))
        bank = self._banks.enter_context(Bank.open(config.bank_url))

        async def run() -> None:
            async with EnginePool([self.engine.url]) as pool:
                made = RolloutController(config, bank, pool, self.source, PlainChat())
                self.controllers.setdefault(process, made)
                await made.run()

        started = asyncio.create_task(run())
        self.runs.setdefault(process, started)
        return started

    async def stop(self, process: int) -> None:
        self.controllers.pop(process).stop("the test stops it")
        await self.runs.pop(process)

    async def close(self) -> None:
        for process in list(self.runs):
            await self.stop(process)
        self._banks.close()


def found_no_room(fleet: Fleet, process: int) -> bool:
    """Whether its last look at the bank was followed by no start."""
    made = fleet.controllers.get(process)
    return made is not None and made._waiting_for.startswith("the trainer:")


def config_of(path: Path, url: str, **rollout: float) -> RunConfig:
    config = make_config(path, turn_deadline_s=60.0, trajectory_deadline_s=60.0, **rollout)
    return replace(config, bank=BankConfig(url=url))


def test_two_processes_share_prompts_and_room(tmp_path: Path, url: str) -> None:
    """Every prompt is played once, by either; what runs and waits stays within the bound, and so does staleness."""

    async def scenario(bank: Bank) -> tuple[Trainer, int]:
        config, most = config_of(tmp_path, url, concurrency=4), 0
        async with ScriptedEngine(lambda request: 3 + request % 7, token_s=0.002) as engine:
            fleet, trainer = Fleet(config, engine, ScriptedSource()), Trainer(config, bank, engine)
            players: set[int] = set()

            async def train() -> None:
                await trainer.train(5, seconds=0.02)
                while players != {0, 1}:  # how often one is faster than the other is not for a test to say
                    await trainer.train(1, seconds=0.02)
                    players.update(process_of(t.group_id) for batch in trainer.batches for t in batch)

            training = asyncio.create_task(train())
            fleet.start(0), fleet.start(1)
            while not training.done():
                counts = bank.counts()
                most = max(most, counts[State.RUNNING] + counts[State.FINISHED] + counts[State.RESERVED])
                done = [run for run in fleet.runs.values() if run.done()]
                assert not done, [run.exception() for run in done]
                await asyncio.sleep(0.005)
            await training
            await fleet.close()
        return trainer, most

    with Bank.open(url) as bank:
        trainer, most = asyncio.run(scenario(bank))
        assert bank.counts()[State.STALE] == bank.counts()[State.FAILED] == 0
        issued, tasks = bank.load_cursor("prompts/train"), [group.group_id for group in bank.open_groups()]
    trained = [t for batch in trainer.batches for t in batch]
    groups = {(t.group_id, t.task["index"]) for t in trained}
    assert sorted({index for _, index in groups} | {int(name.split("-")[1]) for name in tasks}) == list(
        range(issued)
    )
    assert len(groups) == 2 * len(trainer.batches)
    assert max(trainer.gaps) <= 1 and most <= 2 * 4  # (max_staleness + 1) * batch


def test_a_process_recovers_its_own_and_nothing_else(tmp_path: Path, sqlite_url: str) -> None:
    """Also the other way round: what it plays does not fail when a process of another number starts."""
    free: list[bool] = []

    def make(task: Task) -> ScriptedEnvironment:
        return ScriptedEnvironment(at={} if free else {"step0": 30.0})

    async def scenario(bank: Bank) -> None:
        config = config_of(tmp_path, sqlite_url, max_staleness=3)
        async with ScriptedEngine(4) as engine:
            fleet, trainer = Fleet(config, engine, ScriptedSource(make)), Trainer(config, bank, engine)
            fleet.start(1)
            await until(lambda: bank.counts()[State.RUNNING] == 16)
            own = {each.trajectory_id for each in bank.list_running()}
            fleet.start(0)
            await until(lambda: found_no_room(fleet, 0))
            await fleet.stop(1)
            fleet.controllers[0]._waiting_for = ""
            await until(lambda: found_no_room(fleet, 0))  # it has looked again, and took nothing over
            assert {t for t, state in states(sqlite_url).items() if state == "running"} == own
            free.append(True)
            fleet.start(1)
            await trainer.train(5)
            players = {t.task["index"]: process_of(t.group_id) for batch in trainer.batches for t in batch}
            assert len(players) == 10 and {players.get(index, 1) for index in range(8)} == {1}
            assert bank.counts()[State.STALE] == 0
            assert not [run for run in fleet.runs.values() if run.done()]
            await fleet.close()

    with Bank.open(sqlite_url) as bank:
        asyncio.run(scenario(bank))


def test_a_second_process_of_a_number_is_refused_and_changes_nothing(
    tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "_CLAIM_PATIENCE_S", 0.2)

    async def scenario(bank: Bank) -> None:
        config = config_of(tmp_path, sqlite_url)
        async with ScriptedEngine(4, token_s=0.01) as engine:
            fleet, trainer = Fleet(config, engine, ScriptedSource()), Trainer(config, bank, engine)
            first = fleet.start(0)
            await until(lambda: bank.counts()[State.RUNNING] > 0)
            with pytest.raises(UserError, match=r"of this number is at work.*--set rollout.process=1"):
                await fleet.start(0)
            await trainer.train(3)
            assert not first.done() and bank.counts()[State.FAILED] == 0
            await fleet.stop(0)
            fleet.start(0)  # the number is free again
            await trainer.train(2)
            await fleet.close()

    with Bank.open(sqlite_url) as bank:
        asyncio.run(scenario(bank))


def test_what_a_number_left_that_is_never_started_again_is_gone_on_with(tmp_path: Path, url: str) -> None:
    """All the room is its own, in groups of which one member has finished: these are trained, with others beside them.
    The number may come back later: nothing of that is its own any more."""
    made: set[str] = set()
    free: list[bool] = []

    def make(task: Task) -> ScriptedEnvironment:
        first = task.task_id not in made
        made.add(task.task_id)
        return ScriptedEnvironment(at={} if free or first else {"step0": 60.0})

    async def scenario(bank: Bank) -> None:
        config = config_of(tmp_path, url, max_staleness=3, takeover_s=0.4)
        async with ScriptedEngine(4) as engine:
            fleet, trainer = Fleet(config, engine, ScriptedSource(make)), Trainer(config, bank, engine)
            fleet.start(1)
            await until(lambda: bank.counts()[State.FINISHED] == bank.counts()[State.RUNNING] == 8)
            finished = {name for name, state in states(url).items() if state == "finished"}
            await fleet.stop(1)
            fleet.start(0)
            free.append(True)
            await trainer.train(5)
            trained = [t for batch in trainer.batches for t in batch]
            assert finished < {t.trajectory_id for t in trained} and bank.counts()[State.STALE] == 0
            assert {t.task["index"] for t in trained[:16]} == set(range(8))
            fleet.start(1)
            await trainer.train(2)
            assert not [run for run in fleet.runs.values() if run.done()]
            await fleet.close()

    with Bank.open(url) as bank:
        asyncio.run(scenario(bank))


@asynccontextmanager
async def first_one_stopped(config: RunConfig, bank: Bank) -> AsyncIterator[Fleet]:
    """A fleet whose number 1 was stopped while its episodes went on; closed after the block."""
    source = ScriptedSource(lambda task: ScriptedEnvironment(at={"step0": 60.0}))
    async with ScriptedEngine(4) as engine:
        fleet = Fleet(config, engine, source)
        fleet.start(1)
        await until(lambda: bank.counts()[State.RUNNING] == 8)
        assert bank.get_state(OLDEST.format(1)) == "0"
        await fleet.stop(1)
        yield fleet
        await fleet.close()


def test_a_number_that_is_gone_is_named_while_it_holds_room(tmp_path: Path, sqlite_url: str) -> None:
    async def scenario(bank: Bank) -> None:
        async with first_one_stopped(config_of(tmp_path, sqlite_url, takeover_s=2000.0), bank) as fleet:
            fleet.start(0)
            await until(lambda: 0 in fleet.controllers and "process 1 is gone" in fleet.controllers[0]._waiting_for)
            assert bank.get_state(OLDEST.format(1)) == "0", "nothing was taken over"

    with Bank.open(sqlite_url) as bank:
        asyncio.run(scenario(bank))


def test_a_process_that_leaves_nothing_to_go_on_with_holds_nobody_back(tmp_path: Path, sqlite_url: str) -> None:
    async def scenario(bank: Bank) -> None:
        async with first_one_stopped(config_of(tmp_path, sqlite_url, flush_s=0.0), bank):
            pass

    with Bank.open(sqlite_url) as bank:
        asyncio.run(scenario(bank))
        assert bank.get_state(OLDEST.format(1)) == "" and bank.counts()[State.RUNNING] == 0


async def until(condition: object, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)
