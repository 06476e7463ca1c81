"""A PostgreSQL server of the tests' own: made in a temporary folder, reached through a socket in it, then deleted."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg
import pytest

REQUIRED = "MEGATRON_ASYNC_TESTS_REQUIRE_POSTGRESQL"
"""Environment variable that makes tests of PostgreSQL fail where there is none, which are otherwise left out."""


def find_binaries() -> Path | None:
    """The folder of initdb and postgres, newest release first; None where PostgreSQL is not installed."""
    candidates = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name), reverse=True
    )
    on_path = shutil.which("initdb")
    candidates += [Path(on_path).resolve().parent] if on_path else []
    return next((p for p in candidates if (p / "initdb").exists() and (p / "postgres").exists()), None)


def why_unavailable() -> str:
    """Why no server can be started here, or "" when one can."""
    if find_binaries() is None:
        return "PostgreSQL (initdb, postgres) is not installed"
    if not shutil.which("setpriv"):
        return "there is no setpriv, without which a killed test would leave its server behind"
    return ""


def require() -> None:
    """For a test that needs a server: left out, or failed if the environment says so, where none can be started."""
    reason = why_unavailable()
    if not reason:
        return
    advice = (
        f"{reason}: the bank was not tested on PostgreSQL. Install it (Debian and Ubuntu: apt-get install postgresql "
        f"util-linux; elsewhere: initdb and postgres on the PATH); {REQUIRED}=1 makes this a failure"
    )
    if os.environ.get(REQUIRED):
        pytest.fail(advice, pytrace=False)
    pytest.skip(advice)


class PostgreSQLServer:
    """Starts when it is made; `new_database` gives URLs of empty ones; `stop` ends and deletes it.

    The server dies with the process that made it, however that ends. As root it runs as user postgres.
    """

    def __init__(self, start_deadline_s: float = 60) -> None:
        binaries = find_binaries()
        assert binaries is not None, why_unavailable()
        self._prefix = ["setpriv", "--pdeathsig=QUIT"]
        self._folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # short: socket paths allow 107 bytes
        if os.geteuid() == 0:
            self._prefix += ["--reuid=postgres", "--regid=postgres", "--init-groups"]
            shutil.chown(self._folder, "postgres", "postgres")
        self._numbers = itertools.count()
        data = str(self._folder / "data")
        made = self._start(
            binaries / "initdb",
            "-D",
            data,
            "-U",
            "bank",
            "--auth=trust",
            "--no-sync",
            "--encoding=UTF8",
            "--locale=C",
        )
        assert made.wait() == 0, self._log()
        # No TCP; no fsync: these tests kill clients, not the machine.
        options = (
            "listen_addresses=",
            f"unix_socket_directories={self._folder}",
            "fsync=off",
            "max_connections=200",
        )
        settings = [part for option in options for part in ("-c", option)]
        self._server = self._start(binaries / "postgres", "-D", data, *settings)
        deadline = time.monotonic() + start_deadline_s
        while not self._answers():
            assert self._server.poll() is None and time.monotonic() < deadline, self._log()
            time.sleep(0.05)

    def new_database(self) -> str:
        """Create an empty schema (much cheaper than a database) and return a URL that sees nothing else."""
        name = f"bank_{next(self._numbers)}"
        self._execute(f"CREATE SCHEMA {name}")
        return f"postgresql://bank@/postgres?host={self._folder}&options=-csearch_path%3D{name}"

    def cut_connections(self) -> None:
        """Cut every client's connection, as a server that restarts does."""
        others = "datname IS NOT NULL AND pid <> pg_backend_pid()"
        self._execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(
            host=str(self._folder), user="bank", dbname="postgres", autocommit=True
        ) as connection:
            connection.execute(statement.encode())

    def stop(self) -> None:
        self._server.send_signal(signal.SIGQUIT)  # PostgreSQL's "immediate" shutdown
        self._server.wait(timeout=60)
        shutil.rmtree(self._folder)

    def _start(self, program: Path, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            command = [*self._prefix, str(program), *arguments]
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/")

    def _answers(self) -> bool:
        try:
            self._execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")
