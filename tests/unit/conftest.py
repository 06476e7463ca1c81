"""Fixtures shared by unit tests: an empty bank on every database it supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bank_support import check_consistent, close_view
from tests.postgresql_server import PostgreSQLServer, require


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgreSQLServer]:
    """One server for the whole session, started when the first test asks for it."""
    require()
    server = PostgreSQLServer()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def new_bank_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes URLs of empty banks; a test with it runs once per database."""
    if request.param == "postgresql":
        server: PostgreSQLServer = request.getfixturevalue("postgresql_server")
        return server.new_database
    names = iter(range(1_000_000))
    return lambda: f"sqlite:///{tmp_path}/bank-{next(names)}.sqlite"


@pytest.fixture
def bank_url(new_bank_url: Callable[[], str]) -> str:
    return new_bank_url()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> Iterator[str]:
    """Of an SQLite bank that is empty, and found consistent after the test."""
    url = f"sqlite:///{tmp_path / 'bank.sqlite'}"
    yield url
    check_consistent(url)
    close_view(url)
