"""One trainer to a bank: a second one waits and gives up, and one whose claim was lost to another ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.bank import Bank
from megatron_async.errors import PartnerGone, UserError
from megatron_async.training import session
from megatron_async.training.batch import BatchFeed
from megatron_async.training.session import Session
from tests.bank_support import close_view, collect_group
from tests.postgresql_server import PostgreSQLServer
from tests.unit.test_rollout_controller import make_config


class Alone:
    """The control of a single rank."""

    def from_rank_zero(self, produce: Any) -> bytes:
        return bytes(produce())


def trainer(bank: Bank, path: Path) -> Any:
    made = object.__new__(Session)
    made.bank, made.config = bank, SimpleNamespace(run_path=path)  # type: ignore[assignment]
    made.feed = BatchFeed(
        make_config(path), Alone(), bank, lambda what: None, keep_claim=made._keep_claim  # type: ignore[arg-type]
    )
    return made


def test_a_second_trainer_does_not_touch_the_bank(
    tmp_path: Path, bank_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_CLAIM_S", 0.2)
    with Bank.open(bank_url) as later:
        with Bank.open(bank_url) as earlier:
            trainer(earlier, tmp_path)._claim()
            with pytest.raises(PartnerGone, match="another trainer is at work"):
                trainer(later, tmp_path)._claim()
            collect_group(earlier, "a"), collect_group(earlier, "b")
            assert len(trainer(earlier, tmp_path).feed.take(0, 0)) == 4
        trainer(later, tmp_path)._claim()  # the earlier one has ended
    close_view(bank_url)


@pytest.mark.parametrize("stays", [True, False])
def test_a_trainer_whose_claim_another_got_takes_no_batch_and_makes_no_version(
    tmp_path: Path, postgresql_server: PostgreSQLServer, stays: bool
) -> None:
    """A cut connection frees the claim: one that nobody else got is taken again. One that another got, though it has
    ended by now, is lost: the bank was wound back in between."""
    url = postgresql_server.new_database()
    with Bank.open(url) as earlier, Bank.open(url) as later:
        first = trainer(earlier, tmp_path)
        first._claim()
        collect_group(earlier, "a"), collect_group(earlier, "b")
        postgresql_server.cut_connections()
        assert len(first.feed.take(0, 0)) == 4
        postgresql_server.cut_connections()
        trainer(later, tmp_path)._claim()
        if not stays:
            later.release("trainer")
        for asks in (lambda: first.feed.take(1, 0), first._next_version):
            with pytest.raises(UserError, match="another trainer took over the bank"):
                asks()
        assert [step.step for step in later.steps()] == [0]
    close_view(url)
