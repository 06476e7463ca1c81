"""Numbers of rollout processes: work changes hands once its number is gone for good, and never beside its holder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_async.bank import Bank
from megatron_async.bank.requests import OLDEST
from megatron_async.errors import PartnerGone
from megatron_async.rollout.numbers import Numbers, claim_name
from tests.bank_support import check_consistent, close_view, collect, collect_group, running
from tests.postgresql_server import PostgreSQLServer

PATIENCE_S = 60.0
LEFT = "group-000000003-p1"


class Process:
    """A rollout process of a number: a bank of its own, and a clock that all share."""

    def __init__(self, url: str, number: int, now: list[float]) -> None:
        self.bank = Bank.open(url)
        self.numbers = Numbers(self.bank, number, 2, PATIENCE_S, clock=lambda: now[0])

    def begin(self) -> None:
        assert self.numbers.claim()
        self.numbers.look(None)

    def end(self) -> None:
        self.bank.close()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def bank(bank_url: str) -> Iterator[Bank]:
    """What number 1 left: one group with a member that waits and one that runs, one that is complete."""
    with Bank.open(bank_url) as bank:
        bank.start_trajectory(running("cut", LEFT))
        collect(bank, "waits", LEFT)
        collect_group(bank, "group-000000001-p1")
        bank.set_state(OLDEST.format(1), "4")
        yield bank
    check_consistent(bank_url)
    close_view(bank_url)


def test_work_changes_hands_after_the_patience_and_once(bank: Bank, bank_url: str, now: list[float]) -> None:
    first, second = Process(bank_url, 0, now), Process(bank_url, 2, now)
    for each in (first, second):
        each.begin()
    assert first.numbers.gone == second.numbers.gone == (1,) and first.numbers.look(7) == 4
    now[0] = PATIENCE_S - 1
    first.numbers.look(7)
    assert not first.numbers.overdue and first.numbers.take_over() == set()
    now[0] = PATIENCE_S
    assert first.numbers.overdue and second.numbers.overdue
    assert first.numbers.take_over() == {LEFT}
    assert second.numbers.take_over() == set()  # it is another's by now
    assert (second.numbers.look(None), first.numbers.look(4)) == (4, None)  # what admission counts from went along
    back = Process(bank_url, 1, now)
    back.begin()
    assert back.numbers.mine([LEFT]) == set() and first.numbers.mine([LEFT]) == {LEFT}
    first.end()
    now[0] += 1
    second.numbers._next_probe = now[0]
    second.numbers.look(None)
    assert second.numbers.gone == (0,)  # the taker's number is gone now, and has it
    for each in (second, back):
        each.end()


def test_a_number_that_is_started_again_in_time_keeps_its_work(bank: Bank, bank_url: str, now: list[float]) -> None:
    survivor = Process(bank_url, 0, now)
    survivor.begin()
    for _ in range(3):  # again and again, and each time the patience begins anew
        now[0] += PATIENCE_S - 10
        survivor.numbers.look(None)
        back = Process(bank_url, 1, now)
        back.begin()
        now[0] += 6
        survivor.numbers.look(None)
        assert survivor.numbers.gone == () and not survivor.numbers.overdue
        assert back.numbers.mine([LEFT]) == {LEFT}
        back.end()
        now[0] += 6
        survivor.numbers.look(None)
        assert survivor.numbers.gone == (1,)
    back = Process(bank_url, 1, now)
    back.begin()
    now[0] += PATIENCE_S  # it came back after the last look: its claim decides
    assert survivor.numbers.overdue and survivor.numbers.take_over() == set()
    assert back.numbers.mine([LEFT]) == {LEFT}
    for each in (survivor, back):
        each.end()


def test_one_whose_connection_was_cut_ends_when_its_work_changed_hands(postgresql_server: PostgreSQLServer) -> None:
    """With nobody there meanwhile it goes on; also while another only asks whether it is free."""
    url, now = postgresql_server.new_database(), [0.0]
    cut, survivor = Process(url, 1, now), Process(url, 0, now)
    for each in (cut, survivor):
        each.begin()
    cut.bank.start_trajectory(running("cut", LEFT))
    postgresql_server.cut_connections()
    assert survivor.bank.is_free(claim_name(1))
    cut.numbers.look(3)
    postgresql_server.cut_connections()
    for now[0] in (10.0, 10.0 + PATIENCE_S):
        survivor.numbers.look(None)
    assert survivor.numbers.take_over() == {LEFT}
    with pytest.raises(PartnerGone, match="rollout.process 1: while the database was away, another rollout process"):
        cut.numbers.look(3)
    for each in (cut, survivor):
        each.end()
    close_view(url)
