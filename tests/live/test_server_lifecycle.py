"""Servers that cannot start say why, and none survives: not its own end, not its starter's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sglang_bridge import EngineServer, EngineStartError, ServerOptions
from tests.live.policies import Policy

pytestmark = pytest.mark.live

ROOT = Path(__file__).resolve().parents[2]


def group_is_gone(group: int, within_s: float) -> bool:
    """Whether no process of the group (zombies aside) is left after at most ``within_s``."""
    limit = time.monotonic() + within_s
    while time.monotonic() < limit:
        living = 0
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                    living += 1
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        if not living:
            return True
        time.sleep(0.1)
    return False


def test_a_server_that_dies_while_starting_shows_its_last_words(policy: Policy, tmp_path: Path) -> None:
    options = ServerOptions(extra_args=("--no-such-flag", "7"))
    server = EngineServer(policy.path, log_path=tmp_path / "log", options=options)
    server.start()
    group = server.pid
    assert group is not None
    with pytest.raises(EngineStartError, match=r"(?s)ended with status \d+ while starting.*no-such-flag"):
        server.wait_ready(120)
    assert group_is_gone(group, 1)
    assert not server.alive()


def test_a_missed_deadline_stops_the_server(policy: Policy, tmp_path: Path) -> None:
    server = EngineServer(policy.path, log_path=tmp_path / "log")
    server.start()
    group = server.pid
    assert group is not None
    with pytest.raises(EngineStartError, match="was not ready after 1 s"):
        server.wait_ready(1)
    assert group_is_gone(group, 1)


def test_a_server_ends_when_its_starter_is_killed(policy: Policy, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from sglang_bridge import EngineServer\n"
        "server = EngineServer(sys.argv[1], log_path=sys.argv[2])\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, str(policy.path), str(tmp_path / "log")]
    group = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout)
    assert group_is_gone(group, 20)


def test_a_port_in_use_is_said_before_anything_starts(policy: Policy, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EngineServer(policy.path, port=port, log_path=tmp_path / "log")
        with pytest.raises(EngineStartError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use"):
            server.start()
    assert not server.alive()
    assert not (tmp_path / "log").exists()


def test_a_running_server_is_not_started_twice(server: EngineServer) -> None:
    with pytest.raises(EngineStartError, match="already running"):
        server.start()
    assert server.alive()
