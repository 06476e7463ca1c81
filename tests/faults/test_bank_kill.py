"""kill -9 of writers and of the trainer while they work: what a call promised is still there, and nothing twice."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_async.bank import Bank
from tests.bank_support import check_consistent, close_view, states, steps_of
from tests.postgresql_server import PostgreSQLServer, require


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/bank.sqlite"
        return
    require()
    server = PostgreSQLServer()
    yield server.new_database()
    server.stop()


def start(role: str, url: str, name: str, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    path = folder / f"{name}.out"
    with path.open("wb") as output:
        command = [sys.executable, "-m", "tests.faults.bank_worker", role, url, name]
        return subprocess.Popen(command, stdout=output), path


def wait_for_work(outputs: list[Path], deadline_s: float = 60) -> None:
    """Until every process has printed something: a kill during the imports tests nothing."""
    started = time.monotonic()
    while not all(path.stat().st_size for path in outputs):
        assert time.monotonic() - started < deadline_s, f"no work after {deadline_s} s: {outputs}"
        time.sleep(0.05)


def one_round(url: str, folder: Path, number: int, rng: random.Random) -> list[list[str]]:
    """Two writers and a trainer work, then all are killed a random moment later; the words of what they printed."""
    jobs = [start("write", url, f"w{number}a", folder), start("write", url, f"w{number}b", folder)]
    jobs.append(start("train", url, f"t{number}", folder))
    try:
        wait_for_work([path for _, path in jobs])
        time.sleep(rng.uniform(0.1, 0.6))
    finally:
        for process, _ in jobs:
            process.send_signal(signal.SIGKILL)
        for process, _ in jobs:
            process.wait()
    # The last line may be cut by the kill; what it said was promised all the same only if it is whole.
    lines = [line for _, path in jobs for line in path.read_text().split("\n")[:-1]]
    return [line.split() for line in lines]


def check_kills(url: str, folder: Path, rounds: int) -> None:
    rng = random.Random(0)
    with Bank.open(url) as bank:
        assert bank.counts()["finished"] == 0
    promised: set[str] = set()
    trained: dict[str, int] = {}
    for number in range(rounds):
        for kind, *rest in one_round(url, folder, number, rng):
            if kind == "finished":
                promised.add(rest[0])
            else:
                for name in rest[1:]:
                    assert name not in trained, f"{name} in steps {trained[name]} and {rest[0]}"
                    trained[name] = int(rest[0])
        check_consistent(url)
        found = states(url)
        assert promised <= {
            name for name, state in found.items() if state in ("finished", "reserved", "trained")
        }
        assert trained == {name: step for name, step in steps_of(url).items() if name in trained}
        with Bank.open(url) as bank:
            partial = bank.list_running()
            assert {len(t) for t in partial} <= {3, 203}  # as started, or as last written down
            assert bank.abandon_running("killed") == len(partial)
    assert len(promised) > 4 * rounds and len(trained) > 2 * rounds
    close_view(url)


def test_kill_9_loses_nothing_and_doubles_nothing(url: str, tmp_path: Path) -> None:
    check_kills(url, tmp_path, rounds=3)


@pytest.mark.slow
def test_many_kills_lose_nothing_and_double_nothing(url: str, tmp_path: Path) -> None:
    check_kills(url, tmp_path, rounds=25)


def check_crowd(url: str, folder: Path, processes: int) -> None:
    jobs = [start("crowd", url, f"c{number}", folder)[0] for number in range(processes)]
    assert [job.wait(timeout=120) for job in jobs] == [0] * processes
    names = {
        f"c{p}.{w}.{n}.{m}" for p in range(processes) for w in range(8) for n in range(2) for m in range(2)
    }
    assert states(url) == dict.fromkeys(names, "finished")
    with Bank.open(url) as bank:
        groups = processes * 8 * 2
        batch = bank.take_batch(0, groups, 2, 0)
        assert batch is not None and {t.trajectory_id for t in batch} == names
    check_consistent(url)
    close_view(url)


def test_sixteen_writers_at_once(url: str, tmp_path: Path) -> None:
    check_crowd(url, tmp_path, processes=2)


@pytest.mark.slow
def test_sixty_four_writers_at_once(url: str, tmp_path: Path) -> None:
    check_crowd(url, tmp_path, processes=8)
