"""The router of a run: one that dies or falls silent comes back with its list, under a bound."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async import restarting
from megatron_async import router as module
from megatron_async.config import load
from megatron_async.config.schema import EngineConfig, RunConfig
from megatron_async.observe import RunFiles
from megatron_async.restarting import RestartBudget
from megatron_async.router import Router, router
from megatron_async.supervise import PartFailed
from sglang_bridge import EngineError, EngineServer
from sglang_bridge.event_loop import BackgroundLoop
from sglang_bridge.router import RouterControl
from tests.unit.bridge_endpoint import raw_endpoint
from tests.unit.configs import write_config

FAKE = str(Path(__file__).with_name("fake_router.py"))
A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run whose router is the program of the tests; a file `broken` keeps it from starting."""
    monkeypatch.setattr(restarting, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(module, "_AGAIN_S", 0.05)
    command = [sys.executable, FAKE]
    broken = str(tmp_path / "broken")
    monkeypatch.setattr(module, "router_command", lambda host, port, metrics: [*command, str(port), broken])
    config = load(write_config(tmp_path, engines={"router": True, "max_restarts": 2}))
    RunFiles(config.run_path).logs.mkdir(parents=True)
    return config


def until(front: Router, met: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not met():
        assert time.monotonic() < limit
        front.tick()
        time.sleep(0.01)


def kill(front: Router, number: int = signal.SIGKILL) -> None:
    assert front._part.pid is not None
    os.kill(front._part.pid, number)


def test_a_router_that_dies_comes_back_with_its_list(config: RunConfig) -> None:
    said: list[str] = []
    with router(config, RunFiles(config.run_path), said.append) as front:
        assert front is not None
        url, control = front.url, RouterControl(front.url)
        front.follow([A])
        assert list(control.workers()) == [A]
        kill(front)
        until(front, lambda: front._part.poll() is not None)
        front.follow([A, B])  # one came while it was away
        until(front, lambda: any("answers again" in text for text in said))
        assert (front.url, sorted(control.workers())) == (url, [A, B])
        pid = front._part.pid
    assert "was killed by SIGKILL" in said[1] and "router: started again in" in said[1]
    assert pid is not None and not Path(f"/proc/{pid}").exists()


def test_one_that_takes_no_list_is_started_again(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config, engines=replace(config.engines, health_deadline_s=0.0))
    said: list[str] = []
    with router(config, RunFiles(config.run_path), said.append) as front:
        assert front is not None
        with monkeypatch.context() as impatient:
            impatient.setattr("sglang_bridge.router._CALL_S", 0.2)
            kill(front, signal.SIGSTOP)
            front.follow([A])
        assert "has not taken its list of engines for" in said[-1]
        until(front, lambda: any("answers again" in text for text in said))
        assert list(RouterControl(front.url).workers()) == [A]


def test_one_that_answers_and_takes_no_engine_is_started_again(config: RunConfig, tmp_path: Path) -> None:
    impatient = replace(config.engines, health_deadline_s=0.2)
    config = replace(config, engines=impatient, publish=replace(config.publish, deadline_s=0.2))
    said: list[str] = []
    with router(config, RunFiles(config.run_path), said.append) as front:
        assert front is not None
        front.follow([A])
        deaf = tmp_path / "broken.deaf"
        deaf.touch()
        until(front, lambda: bool(front.follow([A, B]) or len(said) > 1))
        limit = "engines.health_deadline_s + publish.deadline_s"
        assert f"({limit}), last: it answers and does nothing" in said[1] and "started again in" in said[1]
        deaf.unlink()
        until(front, lambda: any("answers again" in text for text in said))
        assert sorted(RouterControl(front.url).workers()) == [A, B]


def http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-OpenSSH_9.6\r\n", b"", http(b'{"workers": [')[:-3], http(b'{"workers": ['), http(b'{"workers": [7]}'),
     http(b'{"workers": [{"url": 1}]}'), http(b'{"workers": null}'), http(b'{"workers": 3}'), http(b"[]"),
     b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\n{}", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZ"],
)  # fmt: skip
def test_nonsense_from_where_a_router_was_is_its_failure_and_no_defect(answer: bytes) -> None:
    loop = BackgroundLoop("not-a-router")
    listening = raw_endpoint(answer)
    try:
        url = loop.run(listening.__aenter__())
        with pytest.raises(EngineError, match=url):
            RouterControl(url).set_workers([A])
    finally:
        loop.close()


def test_servers_of_our_own_are_asked_directly_whatever_proxy_the_environment_names(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with router(config, RunFiles(config.run_path), lambda text: None) as front:
        assert front is not None
        front.follow([A])
        assert list(RouterControl(front.url).workers()) == [A]
        engine = EngineServer("m", port=int(front.url.rsplit(":", 1)[1]), log_path="log")
        monkeypatch.setattr(engine, "alive", lambda: True)
        assert engine.answers()
        assert not any(name.lower().endswith("_proxy") for name in front._part._environment)
    around = engine._environment()
    assert around["http_proxy"] == "http://127.0.0.1:9"  # a model may come from a hub
    assert around["no_proxy"] == around["NO_PROXY"] == "127.0.0.1,127.0.0.1,localhost,::1"


def test_one_that_cannot_start_again_ends_the_run_with_the_reason(config: RunConfig, tmp_path: Path) -> None:
    said: list[str] = []
    with router(config, RunFiles(config.run_path), said.append) as front:
        assert front is not None
        (tmp_path / "broken").touch()
        kill(front)
        with pytest.raises(PartFailed, match=r"(?s)exit code 1.*cannot listen: planned.*given up after 3 failures"):
            until(front, lambda: False)
    assert sum("started again in" in text for text in said) == 2


def test_one_that_does_not_start_at_all_ends_the_run_at_once(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    said: list[str] = []
    with pytest.raises(PartFailed, match="cannot listen: planned"):
        with router(config, RunFiles(config.run_path), said.append):
            pass
    assert said == []


@pytest.mark.parametrize(("times", "expected"), [([0, 1, 2, 3], [1, 2, 4, None]), ([0, 1, 20, 21], [1, 2, 1, 2])])
def test_pauses_double_and_old_failures_are_forgotten(times: list[float], expected: list[Any]) -> None:
    budget = RestartBudget(EngineConfig(max_restarts=3, restart_window_s=10.0))
    assert [budget.failed(at) for at in times] == expected
