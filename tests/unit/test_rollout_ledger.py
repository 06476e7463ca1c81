"""The rollout's side of the bank: finished trajectories share transactions, and never each other's errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_async.bank import Bank, BankError, State
from megatron_async.rollout.ledger import Ledger
from megatron_async.trajectory import Trajectory, VersionSpan
from tests.bank_support import check_consistent, close_view, end, running


class HeldBank(Bank):
    """A bank whose first record of an end takes until it is let go; counts how many ends each transaction had."""

    def finish_trajectories(self, batch: Sequence[Trajectory]) -> list[State]:
        if not self.sizes:
            self.sizes.append(0)
            self.busy.set()
            assert self.go_on.wait(30)
        states = super().finish_trajectories(batch)
        self.sizes.append(len(batch))
        return states


@pytest.fixture
def bank(tmp_path: Path):  # type: ignore[no-untyped-def]
    url = f"sqlite:///{tmp_path}/bank.sqlite"
    with HeldBank.open(url) as bank:
        bank.sizes, bank.busy, bank.go_on = [], threading.Event(), threading.Event()
        yield bank
    check_consistent(url)
    close_view(url)


async def finish_behind_a_slow_disk(
    bank: HeldBank, first: Trajectory, later: Sequence[Trajectory]
) -> list[State | BaseException]:
    """What the ledger answers for `first` and for those that finish while the disk is busy with it."""
    ledger = Ledger(bank)
    calls = [asyncio.create_task(ledger.finish(first))]
    await asyncio.to_thread(bank.busy.wait, 30)
    calls += [asyncio.create_task(ledger.finish(each)) for each in later]
    await asyncio.sleep(0)  # they have all asked
    bank.go_on.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    ledger.close()
    return answers


def test_what_finishes_while_the_disk_is_busy_shares_one_transaction(bank: HeldBank) -> None:
    members = [running(f"t{i}", f"g{i % 3}") for i in range(9)]
    bank.start_trajectories(members)
    for each in members:
        end(each)
    answers = asyncio.run(finish_behind_a_slow_disk(bank, members[0], members[1:]))
    assert answers == [State.FINISHED] * 9
    assert bank.sizes == [0, 1, 8]
    assert bank.counts()[State.FINISHED] == 9


def test_one_that_the_bank_refuses_does_not_keep_the_others_out(bank: HeldBank) -> None:
    members = [running(f"t{i}", "g") for i in range(4)]
    bank.start_trajectories(members)
    stranger = running("never started", "g")
    for each in (*members, stranger):
        end(each)
    answers = asyncio.run(finish_behind_a_slow_disk(bank, members[0], [members[1], stranger, *members[2:]]))
    assert isinstance(answers.pop(2), BankError)
    assert answers == [State.FINISHED] * 4
    assert bank.counts()[State.FINISHED] == 4


def test_what_was_asked_for_is_done_also_when_who_asked_is_stopped(bank: HeldBank) -> None:
    """A stop cancels members whose end waits for the disk, and the round that writes tokens down."""
    members, grows = [running(f"t{i}", f"g{i}") for i in range(3)], running("grows", "g0")
    bank.start_trajectories([*members, grows])
    for each in members:
        end(each)

    async def scenario() -> dict[str, State]:
        ledger = Ledger(bank)
        calls = [asyncio.create_task(ledger.finish(members[0]))]
        await asyncio.to_thread(bank.busy.wait, 30)
        grows.append_action([9], [-0.5], [VersionSpan(0, 0, 1)])
        calls += [asyncio.create_task(ledger.finish(each)) for each in members[1:]]
        calls += [asyncio.create_task(ledger.checkpoint([grows.snapshot()]))]
        await asyncio.sleep(0)  # they have all asked
        for call in calls:
            call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in answers)
        leaving = asyncio.create_task(ledger.leave_nothing([each.trajectory_id for each in members], "stopped"))
        await asyncio.sleep(0)
        bank.go_on.set()
        await leaving
        ledger.close()
        return bank.states_of(["t0", "t1", "t2"])

    assert set(asyncio.run(scenario()).values()) == {State.FINISHED}
    assert [each.token_ids.tolist() for each in bank.list_running()] == [[1, 2, 3, 9]]


def test_a_call_that_nobody_waits_for_does_not_fail_in_silence(
    bank: HeldBank, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        ledger = Ledger(bank)
        call = asyncio.create_task(ledger.checkpoint([running("never started", "g")]))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        ledger.close()

    asyncio.run(scenario())
    assert "that nobody waited for failed: BankError: trajectory 'never started' is unknown" in caplog.text
