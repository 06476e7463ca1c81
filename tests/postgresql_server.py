"""A PostgreSQL server of the tests' own: made in a temporary folder, reached through a socket in it, then deleted."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psycopg


def find_binaries() -> Path | None:
    """The folder of initdb and pg_ctl, newest release first; None where PostgreSQL is not installed."""
    candidates = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name), reverse=True
    )
    on_path = shutil.which("initdb")
    candidates += [Path(on_path).resolve().parent] if on_path else []
    return next((p for p in candidates if (p / "initdb").exists() and (p / "pg_ctl").exists()), None)


def why_unavailable() -> str:
    """Why no server can be started here, or "" when one can."""
    if find_binaries() is None:
        return "PostgreSQL (initdb, pg_ctl) is not installed"
    if os.geteuid() == 0 and not shutil.which("runuser"):
        return "PostgreSQL refuses to run as root and there is no runuser"
    return ""


class PostgreSQLServer:
    """Starts when it is made; `new_database` gives URLs of empty ones; `stop` ends and deletes it."""

    def __init__(self) -> None:
        binaries = find_binaries()
        assert binaries is not None, why_unavailable()
        self._binaries = binaries
        self._prefix = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        self._folder = Path(
            tempfile.mkdtemp(prefix="pg-", dir="/tmp")
        )  # a short path: sockets allow 107 bytes
        if self._prefix:
            shutil.chown(self._folder, "postgres", "postgres")
        self._numbers = itertools.count()
        self._data = self._folder / "data"
        self._run(
            "initdb",
            "-D",
            str(self._data),
            "-U",
            "bank",
            "--auth=trust",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C",
        )
        # No TCP; no fsync: these tests kill clients, not the machine.
        settings = (
            "listen_addresses=''",
            f"unix_socket_directories='{self._folder}'",
            "fsync=off",
            "max_connections=200",
        )
        options = " ".join(f"-c {setting}" for setting in settings)
        self._run(
            "pg_ctl", "-D", str(self._data), "-w", "-l", str(self._folder / "log"), "-o", options, "start"
        )

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
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(self._folder)

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._prefix, str(self._binaries / program), *arguments]
        # A file, not a pipe: the server inherits it and would keep a pipe open.
        with tempfile.TemporaryFile() as output:
            code = subprocess.run(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd="/"
            ).returncode
            output.seek(0)
            assert code == 0, f"{program} ended with {code}: {output.read().decode(errors='replace')}"
