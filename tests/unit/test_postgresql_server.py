"""Tests of PostgreSQL are never left out without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import postgresql_server


def test_without_a_server_they_fail_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql_server, "find_binaries", lambda: None)
    monkeypatch.delenv(postgresql_server.WITHOUT, raising=False)
    with pytest.raises(pytest.fail.Exception, match=f"apt-get install postgresql.*{postgresql_server.WITHOUT}=1"):
        postgresql_server.require()


def test_the_environment_may_leave_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(postgresql_server.WITHOUT, "1")
    monkeypatch.setattr(postgresql_server, "find_binaries", lambda: None)
    with pytest.raises(pytest.skip.Exception, match="not installed"):
        postgresql_server.require()
    monkeypatch.setattr(postgresql_server, "find_binaries", lambda: Path("/bin"))
    monkeypatch.setattr(postgresql_server.shutil, "which", lambda name: f"/bin/{name}")
    postgresql_server.require()  # one that is there is used
