"""Engines that die, freeze, do not come up, or are reported: started again, given up, counted."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_async import engine_watch
from megatron_async.bank import Bank
from megatron_async.bank.requests import DRAIN, PUBLISHED
from megatron_async.config import from_dict
from megatron_async.config.placement import place
from megatron_async.config.schema import RunConfig
from megatron_async.engine_watch import EngineWatch
from megatron_async.fleet import Fleet
from megatron_async.machines import Others
from megatron_async.observe import RunFiles
from megatron_async.roster import Engine, failed_key, read_roster
from megatron_async.supervise import PartFailed
from sglang_bridge import EngineStartError, ServerOptions
from tests.unit.scripted_engine import ScriptedEngine

NOBODY = "http://127.0.0.1:9"


@dataclass
class Process:
    """Stands for a server process: a test says what it does."""

    model_path: str
    host: str
    port: int
    log_path: Path
    options: ServerOptions
    url: str = NOBODY
    up: bool = False
    exit_code: int | None = None
    started: bool = False
    refuses: bool = False

    def start(self) -> None:
        if self.refuses:
            raise EngineStartError("cannot listen on 127.0.0.1:5: Address already in use")
        self.started = True

    def wait_ready(self, deadline_s: float) -> None:
        self.up = True

    def alive(self) -> bool:
        return self.started and self.exit_code is None

    def answers(self) -> bool:
        return self.alive() and self.up

    def log_tail(self) -> str:
        return "CUDA error: an illegal memory access"

    def interrupt(self) -> None:
        """Heard, not obeyed."""

    def stop(self, timeout: float) -> None:
        self.started = False


@dataclass
class Machine:
    """A fleet whose processes and clock a test moves."""

    config: RunConfig
    now: float = 1000.0
    processes: list[Process] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    url: str = NOBODY
    refuses: bool = False

    def fleet(self) -> Fleet:
        return Fleet(
            self.config, RunFiles(self.config.run_path), place(self.config)[0], "127.0.0.1",
            lambda devices: ServerOptions(), self.said.append, clock=lambda: self.now, server=self.make,
        )  # fmt: skip

    def make(self, model_path: str, host: str, port: int, **options: Any) -> Process:
        process = Process(model_path, host, port, url=self.url, refuses=self.refuses, **options)
        self.processes.append(process)
        return process

    def until_started_again(self, fleet: Fleet) -> Process:
        """Let the pause pass, the process start and answer."""
        before = len(self.processes)
        while len(self.processes) == before:
            self.now += 0.5
            fleet.tick()
        self.processes[-1].up = True
        fleet.tick()
        return self.processes[-1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    engines = {"count": 2, "max_restarts": 2, "restart_window_s": 1000, "start_deadline_s": 60, "base_port": 30_000}
    config = from_dict(
        {"name": "r", "run_dir": str(tmp_path), "model": {"path": "first"}, "engines": engines,
         "publish": {"deadline_s": 100}}
    )  # fmt: skip
    config.run_path.mkdir(parents=True)
    return Machine(config)


def test_an_engine_that_dies_is_started_again_as_another_one(machine: Machine) -> None:
    with machine.fleet() as fleet:
        assert [engine.name for engine in fleet.engines] == ["0.0", "1.0"]
        machine.processes[1].exit_code = -9
        fleet.tick()
        assert [engine.name for engine in fleet.engines] == ["0.0"]
        assert fleet.hopeful == 2
        assert "engine 1 at http://127.0.0.1:9 was killed by SIGKILL" in machine.said[-1]
        assert "illegal memory access" in machine.said[-1]
        again = machine.until_started_again(fleet)
        assert (again.port, again.model_path, again.options.weight_version) == (30_001, "first", 0)
        assert [engine.name for engine in fleet.engines] == ["0.0", "1.1"]
        assert fleet.restarts == 1


def test_an_engine_that_keeps_dying_is_given_up_with_its_reason(machine: Machine) -> None:
    with machine.fleet() as fleet:
        for _ in range(2):
            machine.processes[-1].exit_code = 1
            fleet.tick()
            machine.until_started_again(fleet)
        machine.processes[-1].exit_code = 1
        fleet.tick()
        assert fleet.hopeful == 1
        assert "given up after 3 failures in 1000 s" in machine.said[-1]
        assert fleet.describe()[1] == (
            "engine 1: given up, started again 2 time(s); last failure: ended with exit code 1; its log ends:"
        )
        machine.now += 10_000
        fleet.tick()
        assert len(machine.processes) == 4


def test_failures_long_ago_are_forgotten(machine: Machine) -> None:
    with machine.fleet() as fleet:
        for _ in range(5):
            machine.processes[-1].exit_code = 1
            fleet.tick()
            machine.until_started_again(fleet)
            machine.processes[0].exit_code = None
            machine.now += 99.0  # within the deadline for a silence
            for slot in fleet._slots:
                slot.heard_of = machine.now
            machine.now += 0.1
            for slot in fleet._slots:
                slot.budget._failures = [t - 1001 for t in slot.budget._failures]
        assert fleet.hopeful == 2 and fleet.restarts == 5


def test_an_engine_that_does_not_come_up_or_cannot_be_started_counts_as_failed(machine: Machine) -> None:
    with machine.fleet() as fleet:
        machine.processes[1].exit_code = 1
        fleet.tick()
        machine.now += 5
        fleet._slots[0].heard_of = machine.now
        fleet.tick()
        assert len(machine.processes) == 3  # started, and never ready
        machine.now += 61
        fleet._slots[0].heard_of = machine.now
        fleet.tick()
        assert "was not ready after 60 s (engines.start_deadline_s)" in machine.said[-1]
        machine.refuses = True
        machine.now += 5
        fleet._slots[0].heard_of = machine.now
        fleet.tick()
        assert "could not be started: cannot listen" in machine.said[-1]
        assert fleet.hopeful == 1


def test_an_engine_that_gives_no_answer_is_killed(machine: Machine) -> None:
    with machine.fleet() as fleet:
        machine.now += 150  # below health_deadline_s 60 + publish.deadline_s 100
        fleet.tick()
        assert len(fleet.engines) == 2
        machine.now += 20
        fleet.tick()
        assert fleet.engines == []
        assert "gave no answer for 170 s" in machine.said[-1]
        assert not machine.processes[0].started


def watch_of(machine: Machine, fleet: Fleet, bank: Bank) -> EngineWatch:
    others = Others(RunFiles(machine.config.run_path), [], set(), "127.0.0.1", 10)
    return EngineWatch(machine.config, fleet, others, bank, machine.said.append)


def states(machine: Machine) -> dict[str, str]:
    return {engine.name: engine.state for engine in read_roster(machine.config.run_path)}


def settle(watching: EngineWatch) -> None:
    """Let the question under way be answered, and be heard."""
    for asked in list(watching._asked.values()):
        asked.exception(timeout=30)
    watching.tick()


@pytest.fixture
def bank(tmp_path: Path) -> Any:
    with Bank.open(f"sqlite:///{tmp_path / 'bank.sqlite'}") as bank:
        yield bank


def test_an_engine_serves_again_once_it_holds_the_published_version(machine: Machine, bank: Bank) -> None:
    async def scenario() -> None:
        async with ScriptedEngine() as engine:
            machine.url = engine.url
            await asyncio.to_thread(over, engine)

    def over(engine: ScriptedEngine) -> None:
        with machine.fleet() as fleet, watch_of(machine, fleet, bank) as watching:
            watching.begin()
            assert states(machine) == {"0.0": "serving", "1.0": "serving"}
            bank.set_state(PUBLISHED, "3")
            machine.processes[1].exit_code = -9
            watching.tick()
            assert states(machine) == {"0.0": "serving"}
            machine.until_started_again(fleet)
            watching.tick()
            settle(watching)
            assert states(machine) == {"0.0": "serving", "1.1": "late"}  # it holds version 0
            engine.version = 3
            watching.tick()
            settle(watching)
            assert states(machine) == {"0.0": "serving", "1.1": "serving"}
            assert machine.said[-1] == "engine 1 holds version 3 and serves"

    asyncio.run(scenario())


def test_what_the_trainer_wants_drained_serves_nobody_until_it_is_done(machine: Machine, bank: Bank) -> None:
    with machine.fleet() as fleet, watch_of(machine, fleet, bank) as watching:
        watching.begin()
        bank.set_state(DRAIN, "1.0")
        watching.tick()
        assert states(machine) == {"0.0": "serving", "1.0": "draining"}
        assert len(watching.urls) == 1
        bank.set_state(DRAIN, "")
        watching.tick()
        assert states(machine) == {"0.0": "serving", "1.0": "serving"}


def test_a_full_disk_ends_no_run_and_the_roster_is_written_when_there_is_room(
    machine: Machine, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine.fleet() as fleet, watch_of(machine, fleet, bank) as watching:
        watching.begin()

        def full(*_args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as disk:
            disk.setattr(engine_watch, "write_roster", full)
            machine.processes[1].exit_code = -9
            watching.tick()
            watching.tick()
            assert states(machine) == {"0.0": "serving", "1.0": "serving"}
            assert sum("No space left on device" in text for text in machine.said) == 1
        watching.tick()
        assert states(machine) == {"0.0": "serving"}


def test_what_the_trainer_reports_is_started_again(machine: Machine, bank: Bank) -> None:
    with machine.fleet() as fleet, watch_of(machine, fleet, bank) as watching:
        watching.begin()
        bank.set_state(failed_key("0.0"), "did not come within 4 s")
        watching.tick()
        assert states(machine) == {"1.0": "serving"}
        assert "was reported by the trainer: did not come within 4 s" in machine.said[-1]
        watching.tick()
        assert fleet.hopeful == 2  # reported once


def test_what_was_reported_of_an_engine_of_an_earlier_run_is_not_held_against_its_namesake(
    machine: Machine, bank: Bank
) -> None:
    """Reported when it had ended already: nobody took the report back, and a resume numbers engines from 0 again."""
    for name in ("0.0", "1.1"):
        bank.set_state(failed_key(name), "could not receive a bucket")
    with machine.fleet() as fleet, watch_of(machine, fleet, bank) as watching:
        watching.begin()
        watching.tick()
        assert fleet.restarts == 0 and states(machine) == {"0.0": "serving", "1.0": "serving"}
        machine.processes[1].exit_code = -9
        watching.tick()
        machine.until_started_again(fleet)
        watching.tick()
        assert sorted(states(machine)) == ["0.0", "1.1"]
        bank.set_state(failed_key("1.1"), "froze")  # this one is meant
        watching.tick()
        assert sorted(states(machine)) == ["0.0"]


def test_too_few_engines_end_the_run_with_the_reasons(machine: Machine, bank: Bank) -> None:
    with machine.fleet() as fleet, watch_of(machine, fleet, bank) as watching:
        watching.begin()
        for process in machine.processes:
            process.exit_code = 1
        for slot in fleet._slots:
            slot.budget._failures = [machine.now] * 2
        with pytest.raises(PartFailed, match=r"(?s)0 of 2 engines are left, engines.quorum is 1.*engine 0: given up"):
            watching.tick()


def test_when_training_is_over_engines_begin_with_the_final_weights(machine: Machine, bank: Bank) -> None:
    with machine.fleet() as fleet, watch_of(machine, fleet, bank) as watching:
        watching.begin()
        bank.set_state(PUBLISHED, "7")
        watching.training_ended(Path("final"))
        machine.processes[1].exit_code = -9
        watching.tick()
        again = machine.until_started_again(fleet)
        assert (again.model_path, again.options.weight_version) == ("final", 7)


def test_engines_of_a_roster_are_told_apart(machine: Machine) -> None:
    assert Engine(3, "http://h:1", 2).name == "3.2"
    assert failed_key("3.2") != failed_key("3.1")
