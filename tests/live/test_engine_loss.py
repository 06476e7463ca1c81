"""One of two engines is killed during a run, then the router: both come back, the run finishes, nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_async.bank import Bank
from megatron_async.bank.requests import PUBLISHED
from megatron_async.observe import read_evaluations, read_metrics
from megatron_async.observe.status import read_status
from megatron_async.roster import Engine, read_roster, read_router
from sglang_bridge.router import RouterControl
from tests.live.test_main_job import processes_of, start, write_config
from tests.live.under_way import with_client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS = 6
FREE_STEPS = 3  # steps whose tasks are not held


def wait_until(condition: Callable[[], bool], job: subprocess.Popen[str], what: str, deadline_s: float = 900.0) -> None:
    limit = time.monotonic() + deadline_s
    while not condition():
        assert job.poll() is None, f"the run ended before {what}: {job.communicate()[0]}"
        assert time.monotonic() < limit, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.2)


def kill(engine: Engine) -> None:
    """SIGKILL to the server process alone, as the kernel does it; its children see to themselves."""
    port = engine.url.rsplit(":", 1)[1]
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "sglang_bridge.serve" in words and words[words.index("--port") + 1] == port:
            process.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"no server listens on {engine.url}")


def router_of(job: subprocess.Popen[str]) -> psutil.Process | None:
    for process in psutil.Process(job.pid).children(recursive=True):
        if process.name() == "sglang::router":  # it renames itself, and its command line with it
            return process
    return None


def check_a_killed_router_comes_back(job: subprocess.Popen[str], run: Path, workers: set[str], go: Path) -> None:
    """The real one, just when episodes are let go; it is given its engines again."""
    old = router_of(job)
    assert old is not None
    control = RouterControl(read_router(run))
    # The roster says that an engine serves before the router was asked to add it.
    wait_until(lambda: set(control.workers()) == workers, job, "the router has the engine that came back")
    go.write_text("")
    time.sleep(0.5)
    old.kill()
    wait_until(lambda: (new := router_of(job)) is not None and new.pid != old.pid, job, "a new router")
    wait_until(lambda: control.answers() and set(control.workers()) == workers, job, "the router has its engines again")


@pytest.mark.parametrize("router", [False, True], ids=["direct", "router"])
def test_a_killed_engine_comes_back_with_the_published_version(
    router: bool, checkpoint: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    config = write_config(
        tmp_path, checkpoint, steps=STEPS, layout={"world_size": 1},
        engines={"count": 2, "router": router, "mem_fraction_static": 0.1, "max_total_tokens": 32768,
                 "start_deadline_s": 900},
        environment={"name": "tests.live.held_tasks:build", "options": {"file": str(go), "free": 3 * FREE_STEPS}},
        trainer={"deadline_s": 620},
    )  # fmt: skip
    run = tmp_path / "runs" / "job"
    job = start(config)
    try:
        wait_until(lambda: len(read_metrics(run)) >= 2, job, "two steps")
        (victim,) = [engine for engine in read_roster(run) if engine.index == 1]
        kill(victim)
        wait_until(
            lambda: any(engine.name == "1.1" and engine.serves for engine in read_roster(run)),
            job, "the engine serves again",
        )  # fmt: skip
        (back,) = [engine for engine in read_roster(run) if engine.index == 1]
        with Bank.open(f"sqlite:///{run / 'bank.sqlite'}") as bank:
            published = int(bank.get_state(PUBLISHED) or 0)
        assert published >= 2
        assert with_client(back.url, lambda client: client.version()) >= published
        if router:
            check_a_killed_router_comes_back(job, run, {engine.url for engine in read_roster(run)}, go)
        go.write_text("")
        output, _ = job.communicate(timeout=900)
    finally:
        for process in processes_of(tmp_path):
            process.kill()
    assert job.returncode == 0, output
    assert "engine 1: running, started again 1 time(s); last failure: was killed by SIGKILL" in output
    rows = read_metrics(run)
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["version_gap/max"] for row in rows) <= 2
    assert read_evaluations(run)[1]["versions"] == [STEPS, STEPS]
    with Bank.open(f"sqlite:///{run / 'bank.sqlite'}") as bank:
        counts = bank.counts()
    assert counts["trained"] == 12 * STEPS
    assert counts["reserved"] == 0
    rollout = read_status(run)["rollout"].counters
    assert (rollout["failed"], rollout["groups_abandoned"]) == (0, 0)  # what ran on the dead engine went on elsewhere
    assert processes_of(tmp_path) == [] and os.path.exists(run / "logs" / "engine_1.log")
