"""A disk that is full for a while is waited for; nothing is half recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sqlalchemy.exc import OperationalError

from megatron_async.bank import Bank, State
from megatron_async.bank import bank as module
from tests.bank_support import check_consistent, close_view, end, running


def pages(bank: Bank, most: int) -> None:
    """Let the database grow to so many pages at most, which for SQLite is what a full disk is."""
    with bank._engine.connect() as conn:
        conn.exec_driver_sql(f"PRAGMA max_page_count = {most}")


def large(bank: Bank) -> None:
    """Start and finish a trajectory that takes some hundred pages."""
    trajectory = running("t", "g")
    bank.start_trajectory(trajectory)
    trajectory.append_context(np.random.default_rng(0).integers(0, 2**31, 100_000))
    assert bank.finish_trajectory(end(trajectory)) is State.FINISHED


def test_a_write_waits_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, waited = f"sqlite:///{tmp_path / 'bank.sqlite'}", []
    with Bank.open(url) as bank:
        pages(bank, 1)  # never below what there is: no page more

        def room(_seconds: float) -> None:
            waited.append(bank.counts())
            pages(bank, 1_000_000)

        monkeypatch.setattr(module.time, "sleep", room)
        large(bank)
        assert bank.counts()[State.FINISHED] == 1
    assert waited and waited[0][State.FINISHED] == 0
    check_consistent(url)
    close_view(url)


def test_a_disk_that_stays_full_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECONNECT_S", 0.0)
    with Bank.open(f"sqlite:///{tmp_path / 'bank.sqlite'}") as bank:
        pages(bank, 1)
        with pytest.raises(OperationalError, match="full"):
            large(bank)
        assert bank.counts()[State.FINISHED] == 0
