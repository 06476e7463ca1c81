"""Several machines of one run, each sees the same folder: who is believed, who is lost, what is started."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_async import join, launch, machines
from megatron_async.config import from_dict
from megatron_async.errors import UserError
from megatron_async.fleet import server_options
from megatron_async.machines import Announcement, Machine, Others, machine_file
from megatron_async.observe import RunFiles
from megatron_async.roster import Engine
from megatron_async.supervise import PartFailed, watch


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def speak(
    files: RunFiles, number: int, beat: int, phase: str = machines.STARTING, token: str = "a", **values
) -> None:
    path = machine_file(files, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"phase": phase, "address": "10.0.0.9", "beat": beat, "token": token, **values})
    )


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path / "run")


def test_what_an_earlier_run_left_is_never_believed(files):
    speak(files, 0, beat=7, phase=machines.ENDED)
    machine = Machine(files, 0)
    assert [machine.look(), machine.look()] == [None, None]
    speak(files, 0, beat=1, token="b")
    said = machine.look()
    assert said is not None
    assert said["phase"] == machines.STARTING


def test_a_machine_that_falls_silent_is_lost_by_the_observers_clock(files):
    clock = Clock()
    machine = Machine(files, 3, lost_s=60, clock=clock)
    speak(files, 3, beat=1)
    machine.look()
    speak(files, 3, beat=2)
    assert machine.look() is not None
    clock.now += 59
    assert machine.look() is not None
    clock.now += 2
    with pytest.raises(PartFailed, match=r"machine 3 \(10\.0\.0\.9\) was not heard of for 61 s"):
        machine.look()
    speak(files, 3, beat=3, phase=machines.ENDED)
    clock.now += 1000
    assert machine.look()["phase"] == machines.ENDED, "who said goodbye may be silent"


def test_a_failure_carries_its_reason(files):
    machine = Machine(files, 1)

    def fail() -> None:
        with Announcement(machine_file(files, 1), beat_s=60, address="here"):
            machine.look()
            raise ZeroDivisionError("by nought")

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(PartFailed, match=r"machine 1 \(here\) failed: ZeroDivisionError: by nought"):
        machine.look()


def test_an_announcement_beats_until_it_ends(files):
    machine = Machine(files, 1)
    with Announcement(machine_file(files, 1), beat_s=0.01, address="here") as announcement:
        said = machine.wait_for((machines.STARTING,), 10, lambda: None)
        announcement.set(phase=machines.READY, engines=["http://here:1"])
        assert machine.look()["engines"] == ["http://here:1"]
    assert machine.look()["phase"] == machines.ENDED
    assert said["address"] == "here"
    assert threading.active_count() < 10
    assert [path.name for path in machine_file(files, 1).parent.iterdir()] == ["machine_1.json"]


def test_a_disk_that_is_full_for_a_while_silences_nobody_for_good(files, monkeypatch):
    really, full = os.replace, threading.Event()

    def replace(fresh: Path, path: Path) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        really(fresh, path)

    monkeypatch.setattr(machines.os, "replace", replace)
    machine = Machine(files, 1)
    with Announcement(machine_file(files, 1), beat_s=0.01, address="here") as announcement:
        machine.wait_for((machines.STARTING,), 10, lambda: None)
        full.set()
        announcement.set(phase=machines.READY)
        time.sleep(0.05)  # beats that cannot be written
        assert machine.look()["phase"] == machines.STARTING
        full.clear()
        machine.wait_for((machines.READY,), 10, lambda: None)  # told late, and not lost
    assert machine.look()["phase"] == machines.ENDED


@pytest.mark.parametrize("content", ["", '{"phase": "start', None], ids=["empty", "half", "away"])
def test_a_file_that_cannot_be_read_now_is_no_news(files, content):
    machine = Machine(files, 1)
    speak(files, 1, beat=1)
    machine.look()
    speak(files, 1, beat=2)
    assert machine.look()["phase"] == machines.STARTING
    path = machine_file(files, 1)
    path.unlink()
    if content is None:
        path.mkdir()  # read as a file system that is away answers: with an error
    else:
        path.write_text(content)
    assert machine.look()["phase"] == machines.STARTING


def test_a_machine_that_never_comes_is_named_with_what_to_do(files):
    clock = Clock()
    machine = Machine(files, 2, clock=clock)

    def tick() -> None:
        clock.now += 100

    with pytest.raises(
        PartFailed, match="machine 2 said nothing after 50 s, waited for ready; start it with --node 2"
    ):
        machine.wait_for((machines.READY,), 50, tick)


def test_the_first_machine_gathers_engines_in_order_and_starts_the_others(files, monkeypatch):
    monkeypatch.setattr(machines, "BEAT_S", 0.01)
    trainer, engines = machine_file(files, 1), machine_file(files, 2)
    with (
        Others(files, [1, 2], {2}, "10.0.0.1", 10) as others,
        Announcement(trainer, beat_s=0.01, address="10.0.0.2"),
        Announcement(engines, beat_s=0.01, address="10.0.0.3") as holder,
    ):
        held = [Engine(index, f"http://10.0.0.3:{index}") for index in (1, 2)]
        holder.set(phase=machines.READY, engines=[asdict(engine) for engine in held], hopeful=2)
        others.gather(lambda: None)
        assert others.engines() == held
        assert others.hopeful() == 2
        others.train()
        said = json.loads(machine_file(files, 0).read_text())
        assert (said["phase"], said["address"]) == (machines.TRAINING, "10.0.0.1")
        others.check()
    assert json.loads(machine_file(files, 0).read_text())["phase"] == machines.ENDED
    with Others(files, [], set(), "127.0.0.1", 10) as alone:
        alone.gather(lambda: None)
        assert (alone.engines(), alone.hopeful()) == ([], 0)


def test_a_lost_machine_that_only_holds_engines_takes_them_with_it_and_no_more(files):
    with Others(files, [1, 2], {1, 2}, "10.0.0.1", 10) as others:
        with Announcement(machine_file(files, 1), beat_s=0.01, address="10.0.0.2") as kept:
            lost = Announcement(machine_file(files, 2), beat_s=0.01, address="10.0.0.3")
            lost.__enter__()
            for number, holder in ((1, kept), (2, lost)):
                engines = [asdict(Engine(number, f"http://10.0.0.9:{number}"))]
                holder.set(phase=machines.READY, engines=engines, hopeful=1)
            others.gather(lambda: None)
            assert others.hopeful() == 2
            lost.__exit__(RuntimeError, RuntimeError("out of memory"), None)
            others.check()
            assert [engine.index for engine in others.engines()] == [1]
            assert others.hopeful() == 1
            assert "machine 2 (10.0.0.3) failed: RuntimeError: out of memory" in others.describe()[0]


def test_an_engine_of_another_machine_is_started_again_when_asked_for(files, monkeypatch):
    class Here:
        hopeful, model_path, version = 1, "m", 0
        engines = [Engine(0, "http://10.0.0.3:1")]
        restarted: list[tuple[str, str]] = []

        def describe(self) -> list[str]:
            return ["engine 0: running"]

        def restart(self, name: str, reason: str) -> None:
            self.restarted.append((name, reason))

    monkeypatch.setattr(machines, "BEAT_S", 0.01)
    here = Here()
    with (
        Others(files, [1], {1}, "10.0.0.1", 10) as others,
        Announcement(machine_file(files, 1), beat_s=0.01, address="10.0.0.3") as announcement,
    ):
        announcement.set(phase=machines.READY)
        lead = Machine(files, 0)
        lead.wait_for((machines.STARTING,), 30, lambda: None)
        orders = join._Orders(here, lead, announcement)
        others.gather(lambda: None)
        others.check()
        others.restart("0.0", "holds no weights")
        others.begin_with("final", 7)
        limit = time.monotonic() + 30
        while not here.restarted or here.version != 7:
            assert time.monotonic() < limit
            orders()
    assert here.restarted[0] == ("0.0", "was reported: holds no weights")
    assert (here.model_path, here.version) == ("final", 7)

def make_config(tmp_path: Path, **sections):
    return from_dict({"name": "run", "run_dir": str(tmp_path), "model": {"path": "m"}, **sections})


def test_trainer_command_of_one_and_of_several_machines(tmp_path):
    alone = launch.trainer_command(make_config(tmp_path, layout={"world_size": 2}), "c.yaml")
    assert alone[4:] == [
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "megatron_async",
        "train",
        "--config",
        "c.yaml",
    ]
    config = make_config(tmp_path, layout={"world_size": 16}, trainer={"nodes": 2}, batch={"groups": 16})
    second = launch.trainer_command(config, "c.yaml", node=1, lead="10.0.0.1")
    assert second[4:12] == [
        "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29500"
    ]  # fmt: skip
    assert second[12:14] == ["--nproc-per-node", "8"]
    with pytest.raises(UserError, match="sft runs on one machine, but the configuration has 2"):
        launch.trainer_command(config, "c.yaml", "sft")


def test_engines_see_only_their_own_devices(tmp_path):
    config = make_config(tmp_path)
    assert server_options(config, (4, 5)).environment == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert server_options(config).environment == {}


def test_a_number_that_is_no_machine_is_refused(tmp_path):
    config = make_config(
        tmp_path, layout={"world_size": 2}, trainer={"nodes": 2}, cluster={"engine_nodes": 1}
    )
    with pytest.raises(UserError, match=r"--node 3: the run has machines 0 to 2 \(trainer.nodes 2 \+ "):
        join.run(config, 3)


def test_a_machine_without_a_lead_gives_up_at_its_deadline(tmp_path):
    config = make_config(
        tmp_path, layout={"world_size": 2}, trainer={"nodes": 2}, cluster={"join_deadline_s": 0.05}
    )
    started = time.monotonic()
    with pytest.raises(PartFailed, match="machine 0 said nothing after 0.05 s"):
        join.run(config, 1, "127.0.0.1")
    assert time.monotonic() - started < 5


def test_watch_calls_every_tick():
    calls: list[str] = []
    watch([], lambda: len(calls) >= 4, lambda: calls.append("a"), lambda: calls.append("b"), poll_s=0)
    assert calls == ["a", "b", "a", "b"]


def test_own_address_is_the_host_names_or_is_asked_for(monkeypatch):
    def resolve(address: str):
        monkeypatch.setattr(machines.socket, "getaddrinfo", lambda *_: [(2, 1, 6, "", (address, 0))])

    resolve("10.1.2.3")
    assert machines.own_address() == "10.1.2.3"
    resolve("127.0.1.1")
    monkeypatch.setattr(machines, "_default_route", lambda: "10.9.9.9")
    assert machines.own_address() == "10.9.9.9"

    def no_route() -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(machines, "_default_route", no_route)
    with pytest.raises(UserError, match="pass --address"):
        machines.own_address()
