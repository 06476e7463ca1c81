"""Tests of PostgreSQL are never left out without a word, and fail where they are required."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import postgresql_server


@pytest.fixture(autouse=True)
def without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql_server, "find_binaries", lambda: None)
    monkeypatch.delenv(postgresql_server.REQUIRED, raising=False)


def test_without_a_server_they_are_left_out_with_what_to_do() -> None:
    with pytest.raises(pytest.skip.Exception, match=f"apt-get install postgresql.*{postgresql_server.REQUIRED}=1"):
        postgresql_server.require()


def test_the_environment_may_require_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(postgresql_server.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="was not tested on PostgreSQL"):
        postgresql_server.require()


def test_one_that_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql_server, "find_binaries", lambda: Path("/bin"))
    monkeypatch.setattr(postgresql_server.shutil, "which", lambda name: f"/bin/{name}")
    postgresql_server.require()
    assert postgresql_server.why_unavailable() == ""
