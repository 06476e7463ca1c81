"""The bank's promises one by one, on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy

from megatron_async.bank import (
    Admitted,
    Bank,
    BankError,
    BankOpenError,
    Issued,
    OpenGroup,
    Place,
    Places,
    State,
    TokensDiscarded,
    batches,
    dialects,
)
from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan
from tests.bank_support import (
    check_consistent,
    close_view,
    collect,
    collect_group,
    end,
    running,
    states,
    steps_of,
)
from tests.postgresql_server import PostgreSQLServer


def ids(batch: list[Trajectory] | None) -> list[str] | None:
    return None if batch is None else [t.trajectory_id for t in batch]


@pytest.fixture
def bank(bank_url: str):  # type: ignore[no-untyped-def]
    with Bank.open(bank_url) as bank:
        yield bank
    check_consistent(bank_url)
    close_view(bank_url)


# ---------------------------------------------------------------- in


def test_a_trajectory_comes_back_as_it_went_in(bank: Bank) -> None:
    kept = [collect(bank, f"t{i}", "g") for i in range(2)]
    assert bank.take_batch(0, groups=1, group_size=2, min_updates=0) == kept


def test_counts_and_admission_follow_the_states(bank: Bank) -> None:
    bank.start_trajectory(running("r", "g0"))
    collect(bank, "bad", "g0", status=Status.ENGINE_ERROR)
    collect_group(bank, "g1")
    collect_group(bank, "g2")
    bank.take_batch(0, 1, 2, 0)
    expected = dict.fromkeys(State, 0) | {"running": 1, "failed": 1, "finished": 2, "reserved": 2}
    assert bank.counts() == expected
    assert bank.admitted() == Admitted(accepted=4, running=1)
    bank.commit_step(0, 0, 0)
    assert bank.admitted() == Admitted(accepted=4, running=1)


@pytest.mark.parametrize("status", [Status.ENVIRONMENT_ERROR, Status.ENGINE_ERROR, Status.ABORTED])
def test_failures_are_not_rewards_and_the_group_waits_for_another_member(bank: Bank, status: Status) -> None:
    collect(bank, "a", "g")
    trajectory = running("b", "g")
    bank.start_trajectory(trajectory)
    assert bank.finish_trajectory(end(trajectory, status=status)) is State.FAILED
    assert bank.take_batch(0, 1, 2, 0) is None
    collect(bank, "c", "g")
    assert ids(bank.take_batch(0, 1, 2, 0)) == ["a", "c"]


def test_a_truncated_trajectory_counts_only_with_a_reward_and_tokens(bank: Bank) -> None:
    collect(bank, "scored", "g", status=Status.TRUNCATED, reward=0.0)
    unscored = running("unscored", "g")
    bank.start_trajectory(unscored)
    assert bank.finish_trajectory(end(unscored, status=Status.TRUNCATED, reward=None)) is State.FAILED
    silent = running("silent", "g")
    bank.start_trajectory(silent)
    silent.finish(Status.TRUNCATED, 0.0)
    assert bank.finish_trajectory(silent) is State.FAILED
    assert ids(bank.take_batch(0, 1, 1, 0)) == ["scored"]


def test_misuse_names_id_state_and_wish(bank: Bank, bank_url: str) -> None:
    trajectory = running("t", "g")
    with pytest.raises(BankError, match="'t' was never started; wanted running -> finished"):
        bank.finish_trajectory(end(running("t", "g")))
    bank.start_trajectory(trajectory)
    with pytest.raises(BankError, match="'t' is running; wanted a new one"):
        bank.start_trajectory(running("t", "g"))
    with pytest.raises(BankError, match="still running"):
        bank.finish_trajectory(trajectory)
    bank.finish_trajectory(end(trajectory))
    with pytest.raises(BankError, match="'t' is finished; wanted running -> finished"):
        bank.finish_trajectory(trajectory)
    with pytest.raises(BankError, match="'t' is finished in the bank"):
        bank.checkpoint_trajectory(running("t", "g"))
    with pytest.raises(BankError, match="is of prompt 'prompt-g', not 'other'"):
        bank.start_trajectory(running("u", "g", prompt_id="other"))
    assert states(bank_url) == {"t": "finished"}


def test_prompts_are_issued_once_and_only_where_there_is_room(bank: Bank, bank_url: str) -> None:
    """Two processes that saw the same place and the same room: the later one starts nothing and hears where it is."""
    with Bank.open(bank_url) as other:
        assert bank.issue([running("a", "g"), running("b", "g")], Place("train", 0, 1, most=3)) == (True, 1)
        assert other.issue([running("c", "h")], Place("train", 0, 1, most=3)) == (False, 1)
        assert other.issue([running("c", "h"), running("d", "h")], Place("train", 1, 2, most=3)) == (False, 1)
        assert bank.counts()["running"] == 2
        bank.finish_trajectory(end(running("a", "g")))
        assert other.issue([running("c", "h")], Place("train", 1, 2, most=3)) == (True, 2)
        assert bank.states_of(["a", "c", "nobody"]) == {"a": State.FINISHED, "c": State.RUNNING}


def test_a_name_is_held_by_one_at_a_time(bank: Bank, bank_url: str) -> None:
    with Bank.open(bank_url) as other:
        assert bank.claim("rollout-0") and bank.claim("rollout-0") and other.claim("rollout-1")
        assert not other.claim("rollout-0") and not bank.claim("rollout-1")
        bank.release("rollout-0")
        assert other.claim("rollout-0")
    assert bank.claim("rollout-0") and bank.claim("rollout-1")  # closing gave both back


def test_asking_whether_a_name_is_free_takes_it_from_nobody(bank: Bank, bank_url: str) -> None:
    with Bank.open(bank_url) as other:
        assert other.is_free("rollout-0") and bank.claim("rollout-0")
        assert not other.is_free("rollout-0") and not bank.is_free("rollout-0") and bank.keeps("rollout-0")
        bank.release("rollout-0")
        assert other.is_free("rollout-0") and other.claim("rollout-0")
        assert not bank.keeps("rollout-0")  # another process held it since
        other.release("rollout-0")
        assert not bank.keeps("rollout-0") and other.keeps("rollout-0")


def test_unfinished_groups_are_those_that_somebody_has_to_go_on_with(bank: Bank) -> None:
    collect_group(bank, "complete")
    collect(bank, "a", "half")
    for name in ("b", "c"):
        bank.start_trajectory(running(name, "played"))
    collect_group(bank, "closed")
    bank.close_group("closed", keep=True)
    collect_group(bank, "over-full")
    bank.start_trajectory(running("surplus", "over-full"))
    collect(bank, "d", "given up")
    bank.close_group("given up", keep=False)
    assert bank.unfinished_groups(2) == ["half", "over-full", "played"]
    assert bank.unfinished_groups() == ["closed", "complete", "half", "over-full", "played"]
    assert ids(bank.list_running(["played", "half"])) == ["b", "c"] and bank.list_running([]) == []
    assert ids(bank.take_batch(0, 3, 2, 0))[:2] == ["complete.0", "complete.1"]
    assert bank.unfinished_groups() == ["half", "over-full", "played"]  # of a group that is done, a member still runs


def test_tokens_of_a_version_nobody_recorded_are_refused(bank: Bank) -> None:
    trajectory = running("t", "g")
    bank.start_trajectory(trajectory)
    end(trajectory, version=1)
    with pytest.raises(BankError, match="tokens of version 1, but the newest recorded version is 0"):
        bank.finish_trajectory(trajectory)
    bank.record_version(1, parent=0, step=0)
    assert bank.finish_trajectory(trajectory) is State.FINISHED


# ---------------------------------------------------------------- partial trajectories and restarts


def test_running_trajectories_survive_as_last_written_down(bank: Bank, bank_url: str) -> None:
    first, second = running("a", "g"), running("b", "g")
    bank.start_trajectory(first)
    bank.start_trajectory(second)
    second.append_action([7], [-1.0], [VersionSpan(0, 0, 1)])
    bank.checkpoint_trajectory(second)
    second.append_action([8], [-1.0], [VersionSpan(0, 0, 1)])  # lost with the process
    with Bank.open(bank_url) as restarted:
        found = restarted.list_running()
        assert [len(t) for t in found] == [3, 4]
        assert found[0] == first
        assert found[1].open_turn == 3
        found[1].append_action([9], [-1.0], [VersionSpan(0, 0, 1)], "stop")
        found[1].finish(Status.OK, 1.0)
        restarted.finish_trajectory(found[1])
        assert restarted.abandon_running("the rollout restarted") == 1
        assert restarted.list_running() == []
    assert states(bank_url) == {"a": "failed", "b": "finished"}


def test_a_restart_finds_the_groups_it_must_complete(bank: Bank) -> None:
    collect_group(bank, "trained")
    bank.take_batch(0, 1, 2, 0)
    collect(bank, "half.0", "half")
    bank.start_trajectory(running("half.1", "half"))
    bank.start_trajectory(running("new.0", "new"))
    bank.abandon_running("killed", ["half.1"])
    assert bank.open_groups() == [
        OpenGroup("half", "prompt-half", {"seed": 1}, running=0, waiting=1, failed=1, closed=False, min_updates=0),
        OpenGroup("new", "prompt-new", {"seed": 1}, running=1, waiting=0, failed=0, closed=False),
    ]
    bank.rollback_uncommitted()
    assert [g.group_id for g in bank.open_groups()] == ["trained", "half", "new"]


def test_cursors_and_state_outlive_the_process(bank: Bank, bank_url: str) -> None:
    assert (bank.load_cursor("train"), bank.get_state("phase")) == (0, None)
    for value in (3, 7):
        bank.save_cursor("train", value)
        bank.set_state("phase", f"training {value}")
    with Bank.open(bank_url) as other:
        assert (other.load_cursor("train"), other.get_state("phase")) == (7, "training 7")


def test_a_group_and_its_cursor_are_recorded_together_or_not_at_all(bank: Bank) -> None:
    first = [running("a", "g"), running("b", "g")]
    assert bank.issue(first, Place("train", 0, 1, most=9), {"key": "kept"}) == Issued(True, 1)
    assert (bank.counts()["running"], bank.load_cursor("train")) == (2, 1)
    with pytest.raises(BankError, match="'a' is running; wanted a new one"):
        bank.issue([running("c", "h"), running("a", "g")], Place("train", 1, 2, most=9), {"key": "lost"})
    assert (bank.counts()["running"], bank.load_cursor("train")) == (2, 1)
    assert bank.get_states(["key", "other"]) == {"key": "kept"}
    assert [g.group_id for g in bank.open_groups()] == ["g"]


# ---------------------------------------------------------------- out


def test_only_complete_groups_leave_oldest_first(bank: Bank) -> None:
    bank.start_trajectory(late := running("old.0", "old"))
    collect_group(bank, "mid")
    collect(bank, "half.0", "half")
    collect_group(bank, "new")
    collect(bank, "old.1", "old")
    assert bank.peek_ready(2) == 2
    bank.finish_trajectory(end(late))
    assert bank.peek_ready(2) == 3
    assert ids(bank.take_batch(0, 2, 2, 0)) == ["old.0", "old.1", "mid.0", "mid.1"]
    assert bank.take_batch(1, 2, 2, 0) is None  # "half" is not complete
    assert ids(bank.take_batch(1, 1, 2, 0)) == ["new.0", "new.1"]


def test_stale_groups_are_marked_whole_and_counted(bank: Bank) -> None:
    bank.record_version(1, 0)
    collect(bank, "g.0", "g", version=0)
    collect(bank, "g.1", "g", version=1)
    collect_group(bank, "h", version=1)
    collect(bank, "open.0", "open", version=0)
    assert bank.take_batch(0, groups=2, group_size=2, min_updates=1) is None
    assert (bank.counts()["stale"], bank.peek_ready(2)) == (2, 1)  # the incomplete group is left alone
    assert ids(bank.take_batch(0, 1, 2, min_updates=1)) == ["h.0", "h.1"]


def test_more_stale_groups_than_one_statement_takes(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_GROUPS_AT_ONCE", 4)
    for g in range(10):
        collect(bank, f"t{g}", f"g{g}")
    bank.record_version(1, 0)
    assert bank.take_batch(0, 1, 1, min_updates=1) is None
    assert (bank.counts()["stale"], bank.peek_ready(1)) == (10, 0)


def test_surplus_members_are_filtered(bank: Bank, bank_url: str) -> None:
    collect_group(bank, "g", size=3)
    bank.start_trajectory(late := running("g.3", "g"))
    assert ids(bank.take_batch(0, 1, 2, 0)) == ["g.0", "g.1"]
    assert bank.finish_trajectory(end(late)) is State.FILTERED
    expected = {"g.0": "reserved", "g.1": "reserved", "g.2": "filtered", "g.3": "filtered"}
    assert states(bank_url) == expected
    with pytest.raises(BankError, match="takes no more members"):
        bank.start_trajectory(running("g.4", "g"))


def test_a_partial_group_goes_as_it_is_once_closed(bank: Bank) -> None:
    collect(bank, "g.0", "g")
    bank.start_trajectory(last := running("g.1", "g"))
    assert bank.close_group("g", keep=True) == 1
    assert bank.peek_ready(4) == 0  # a member still runs
    bank.finish_trajectory(end(last, status=Status.ENVIRONMENT_ERROR))
    assert ids(bank.take_batch(0, 1, 4, 0)) == ["g.0"]


def test_places_that_kept_groups_leave_empty_are_counted(bank: Bank) -> None:
    """Two groups of four to a batch, one of them kept with one member, and one with three."""
    assert bank.places(2, 4) == Places(waiting=0, reserved=0, batches=0)
    for name, members in (("a", 4), ("b", 1), ("c", 3)):
        collect_group(bank, name, members)
        bank.close_group(name, keep=True)
    assert bank.places(2, 4) == Places(waiting=4, reserved=0, batches=0)
    bank.take_batch(0, 2, 4, 0)
    assert bank.places(2, 4) == Places(waiting=1, reserved=3, batches=1)
    bank.record_version(1, 0, 0)
    bank.commit_step(0, 0, 1, {})
    assert bank.places(2, 4) == Places(waiting=1, reserved=0, batches=1)
    bank.rollback_uncommitted(-1)  # the batch will be trained again as it was
    assert bank.places(2, 4) == Places(waiting=1, reserved=3, batches=1)


def test_a_group_given_up_is_filtered(bank: Bank, bank_url: str) -> None:
    collect(bank, "g.0", "g")
    bank.start_trajectory(last := running("g.1", "g"))
    assert bank.close_group("g", keep=False, reason="retries used up") == 0
    assert bank.finish_trajectory(end(last)) is State.FILTERED
    assert states(bank_url) == {"g.0": "filtered", "g.1": "filtered"}
    assert bank.open_groups() == []


@pytest.mark.parametrize("how", ["fails", "is abandoned"])
def test_a_closed_group_without_a_member_left_is_done(bank: Bank, how: str) -> None:
    bank.start_trajectory(last := running("g.0", "g"))
    bank.close_group("g", keep=True)
    if how == "fails":
        bank.finish_trajectory(end(last, status=Status.ENGINE_ERROR))
    else:
        bank.abandon_running("killed")
    assert (bank.open_groups(), bank.peek_ready(1)) == ([], 0)


def test_a_step_holds_one_batch_and_is_committed_once(bank: Bank) -> None:
    for g in "abc":
        collect_group(bank, g)
    bank.take_batch(0, 1, 2, 0)
    with pytest.raises(BankError, match="step 0 is reserved; wanted a new batch"):
        bank.take_batch(0, 1, 2, 0)
    bank.commit_step(0, 0, 0, {"loss": np.float32(0.5)})
    with pytest.raises(BankError, match="step 0 is committed; wanted reserved -> committed"):
        bank.commit_step(0, 0, 0)
    with pytest.raises(BankError, match="step 0 is committed; wanted a new batch"):
        bank.take_batch(0, 1, 2, 0)
    with pytest.raises(BankError, match="step 7 is not there"):
        bank.commit_step(7, 0, 0)
    (step,) = bank.steps()
    assert (step.state, step.trajectories, step.metrics) == ("committed", 2, {"loss": 0.5})


def test_rollback_returns_what_was_not_committed(bank: Bank, bank_url: str) -> None:
    for g in "abc":
        collect_group(bank, g)
    bank.take_batch(0, 1, 2, 0)
    bank.commit_step(0, 0, 0)
    taken = ids(bank.take_batch(1, 1, 2, 0))
    assert bank.rollback_uncommitted() == 2
    assert bank.rollback_uncommitted() == 0
    assert ids(bank.take_batch(1, 1, 2, 0)) == taken == ["b.0", "b.1"]
    assert steps_of(bank_url)["a.0"] == 0


def test_a_batch_given_back_keeps_its_age(bank: Bank) -> None:
    collect_group(bank, "g")
    bank.take_batch(0, 1, 2, 0)
    bank.rollback_uncommitted()
    bank.record_version(1, parent=0)
    assert bank.take_batch(0, 1, 2, min_updates=1) is None
    assert bank.counts()["stale"] == 2


def test_steps_after_the_resumed_checkpoint_are_trained_again_in_order(bank: Bank) -> None:
    """A checkpoint of step 0 is resumed after steps 1 and 2: their recorded batches come back, then new ones."""
    for g in "abcd":
        collect_group(bank, g)
    batches = []
    for step in range(3):
        batches.append(ids(bank.take_batch(step, 1, 2, 0)))
        bank.commit_step(step, 0, 0)
    assert bank.rollback_uncommitted(checkpoint_step=0) == 0
    assert ids(bank.take_batch(1, 1, 2, 0)) == batches[1]
    assert bank.rollback_uncommitted(checkpoint_step=0) == 0  # a second crash keeps the record
    for step in (1, 2):
        assert ids(bank.take_batch(step, 1, 2, min_updates=99)) == batches[step]  # recorded, so not stale
        bank.commit_step(step, 0, 0)
    assert ids(bank.take_batch(3, 1, 2, 0)) == ["d.0", "d.1"]


def test_payloads_go_when_no_checkpoint_can_ask_for_them(bank: Bank) -> None:
    for g in "abc":
        collect_group(bank, g)
    for step in range(2):
        bank.take_batch(step, 1, 2, 0)
        bank.commit_step(step, 0, 0)
    collect(bank, "bad", "c2", status=Status.ABORTED)
    assert bank.discarded_through() == -1
    assert bank.discard_payloads(through_step=0) == 3
    assert bank.discard_payloads(through_step=0) == 0
    assert bank.discarded_through() == 0
    assert bank.rollback_uncommitted(checkpoint_step=0) == 0
    assert ids(bank.take_batch(1, 1, 2, 0)) == ["b.0", "b.1"]
    assert bank.counts()["trained"] == 2


def test_nobody_goes_back_to_before_what_was_discarded(bank: Bank) -> None:
    """Refused as a whole: afterwards the bank is as it was, and newer checkpoints can still be resumed."""
    for step, g in enumerate("abc"):
        collect_group(bank, g)
        bank.take_batch(step, 1, 2, 0)
        bank.commit_step(step, 0, 0)
    bank.discard_payloads(through_step=1)
    bank.discard_payloads(through_step=0)  # an older generation that came back changes nothing
    with pytest.raises(TokensDiscarded, match="state after step 0: tokens of steps up to 1 were deleted"):
        bank.rollback_uncommitted(checkpoint_step=0)
    assert [step.state for step in bank.steps()] == ["committed"] * 3
    bank.rollback_uncommitted(checkpoint_step=1)
    assert ids(bank.take_batch(2, 1, 2, 0)) == ["c.0", "c.1"]


# ---------------------------------------------------------------- versions


def test_version_ids_are_never_used_again(bank: Bank) -> None:
    bank.record_version(0, None, None)  # the starting checkpoint, there already
    for version in range(1, 4):
        bank.record_version(version, parent=version - 1, step=version - 1)
    assert bank.current_version() == 3
    bank.set_current_version(1)  # a resume from the checkpoint of version 1
    assert (bank.current_version(), bank.next_version()) == (1, 4)
    with pytest.raises(BankError, match="version 2 was recorded before .* next one is 4"):
        bank.record_version(2, parent=1, step=1)
    bank.record_version(4, parent=1, step=1)
    assert bank.current_version() == 4
    assert [(v.version, v.parent, v.step) for v in bank.versions()] == [
        (0, None, None), (1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 1, 1)
    ]  # fmt: skip


def test_versions_need_a_known_parent_and_grow(bank: Bank) -> None:
    with pytest.raises(BankError, match="parent 4 is not recorded"):
        bank.record_version(5, parent=4)
    with pytest.raises(BankError, match="parent None is not recorded"):
        bank.record_version(5, parent=None)
    bank.record_version(5, parent=0)
    with pytest.raises(BankError, match="version 3 is below the newest recorded version 5"):
        bank.record_version(3, parent=0)
    with pytest.raises(BankError, match="version 9 is not recorded"):
        bank.set_current_version(9)
    assert bank.current_version() == 5


# ---------------------------------------------------------------- the database's own guard


@pytest.mark.parametrize("target", ["trained", "running", "nonsense"])
def test_the_database_refuses_a_foreign_transition(bank: Bank, bank_url: str, target: str) -> None:
    collect(bank, "t", "g")
    engine = dialects.make_engine(bank_url)
    with pytest.raises(sqlalchemy.exc.DBAPIError, match="no such transition"):
        with engine.begin() as conn:
            conn.exec_driver_sql(f"UPDATE trajectories SET state = '{target}', step = 1")
    engine.dispose()
    assert states(bank_url) == {"t": "finished"}


def test_the_database_refuses_a_trajectory_that_starts_elsewhere(bank: Bank, bank_url: str) -> None:
    collect(bank, "t", "g")
    engine = dialects.make_engine(bank_url)
    with pytest.raises(sqlalchemy.exc.DBAPIError, match="starts as running"):
        with engine.begin() as conn:
            conn.exec_driver_sql(
                "INSERT INTO trajectories (trajectory_id, group_position, state, status, tokens, action_tokens, "
                "started_at) SELECT 'u', group_position, 'finished', 'ok', 1, 1, 0 FROM trajectories"
            )
    engine.dispose()
    assert states(bank_url) == {"t": "finished"}


# ---------------------------------------------------------------- many at once


def test_two_trainers_cannot_hold_one_step(bank: Bank, bank_url: str) -> None:
    for g in range(8):
        collect_group(bank, str(g))
    outcomes: list[object] = []

    def take() -> None:
        with Bank.open(bank_url) as own:
            try:
                outcomes.append(ids(own.take_batch(0, 2, 2, 0)))
            except BankError as error:
                outcomes.append(error)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(o).__name__ for o in outcomes) == ["BankError"] * 3 + ["list"], outcomes
    assert bank.counts()["reserved"] == 4


def test_writers_and_a_trainer_at_once_lose_and_double_nothing(bank: Bank, bank_url: str) -> None:
    writers, each = 6, 6
    trained: list[str] = []
    errors: list[BaseException] = []

    def write(name: int) -> None:
        with Bank.open(bank_url) as own:
            for g in range(each):  # every second group is filled by two writers together
                group = f"shared-{g}-{name // 2}" if g % 2 else f"own-{g}-{name}"
                for member in range(1 if g % 2 else 2):
                    collect(own, f"{name}.{g}.{member}", group)

    def train() -> None:
        with Bank.open(bank_url) as own:
            step = 0
            while len(trained) < writers * (each // 2) * 3:
                batch = own.take_batch(step, 1, 2, 0)
                if batch is not None:
                    own.commit_step(step, 0, 0)
                    trained.extend(t.trajectory_id for t in batch)
                    step += 1

    def guarded(job: object, *args: object) -> None:
        try:
            job(*args)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(write, n), daemon=True) for n in range(writers)]
    threads.append(threading.Thread(target=guarded, args=(train,), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == []
    assert len(trained) == len(set(trained)) == writers * (each // 2) * 3
    assert bank.counts() == dict.fromkeys(State, 0) | {"trained": len(trained)}


def test_a_lost_connection_is_made_again(postgresql_server: PostgreSQLServer) -> None:
    """Every connection to the server is cut between calls and inside one; nothing is lost, nothing is doubled."""
    url = postgresql_server.new_database()
    with Bank.open(url) as bank, Bank.open(url) as other:
        assert bank.claim("rollout-0")
        collect(bank, "a.0", "a")
        postgresql_server.cut_connections()
        collect(bank, "a.1", "a")
        assert bank.claim("rollout-0") and not other.claim("rollout-0")  # taken again
        cuts = iter([True])

        def cut_once(conn: object, *args: object) -> None:
            if next(cuts, False):
                postgresql_server.cut_connections()

        sqlalchemy.event.listen(bank._engine, "before_cursor_execute", cut_once)
        batch = bank.take_batch(0, 1, 2, 0)
        assert ids(batch) == ["a.0", "a.1"]
        assert next(cuts, None) is None
    check_consistent(url)
    close_view(url)


# ---------------------------------------------------------------- opening


def test_opening_twice_keeps_everything(bank_url: str) -> None:
    with Bank.open(bank_url) as bank:
        collect_group(bank, "g")
    with Bank.open(bank_url) as bank:
        assert (bank.counts()["finished"], bank.peek_ready(2)) == (2, 1)


def test_many_processes_may_open_a_new_bank_at_the_same_moment(bank_url: str) -> None:
    opened: list[int] = []
    start = threading.Barrier(8)

    def open_it() -> None:
        start.wait()
        with Bank.open(bank_url) as bank:
            opened.append(bank.current_version())

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [0] * 8


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:////nowhere/at/all/bank.sqlite", "the folder must exist"),
        ("mysql://host/bank", "mysql is not supported"),
        ("bank.sqlite", "not a database URL"),
        ("postgresql://bank@/x?host=/nowhere&connect_timeout=2", "the server must run"),
    ],
)
def test_a_bank_that_cannot_be_opened_says_how_to_mend_it(url: str, message: str) -> None:
    with pytest.raises(BankOpenError, match=message):
        Bank.open(url)


def test_a_bank_of_another_release_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/bank.sqlite"
    Bank.open(url).close()
    engine = dialects.make_engine(url)
    with engine.begin() as conn:
        conn.exec_driver_sql("UPDATE bank_schema SET number = 99")
    engine.dispose()
    with pytest.raises(BankOpenError, match="layout 99"):
        Bank.open(url)


def test_sampling_parameters_travel_with_the_trajectory(bank: Bank) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=12)
    trajectory = Trajectory("t", "g", "p", params)
    trajectory.append_context([1])
    bank.start_trajectory(trajectory)
    bank.finish_trajectory(end(trajectory))
    (back,) = bank.take_batch(0, 1, 1, 0) or []
    assert back.sampling == params


def test_no_frequent_query_walks_through_all_rows(tmp_path: Path) -> None:
    """SQLite's plans for everything a run does every step or poll: a search in an index, never a scan of a table.

    The index of running trajectories holds nothing else, so walking through it is no walk through the table.
    """
    url = f"sqlite:///{tmp_path}/bank.sqlite"
    with Bank.open(url) as bank:
        plans: list[tuple[str, str]] = []

        def explain(
            conn: sqlalchemy.Connection, cursor: Any, statement: str, parameters: Any, *_: Any
        ) -> None:
            if statement.startswith(("SELECT", "UPDATE", "DELETE")):
                rows = (
                    conn.connection.cursor().execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
                )
                plans.extend((statement, row[3]) for row in rows)

        sqlalchemy.event.listen(bank._engine, "before_cursor_execute", explain)
        collect_group(bank, "a")
        collect_group(bank, "b", size=3)  # "a" is trained, "b" becomes stale
        bank.start_trajectory(late := running("c", "c"))
        bank.checkpoint_trajectory(late)
        bank.close_group("c", keep=True)
        bank.take_batch(0, 1, 2, 0)
        bank.rollback_uncommitted()
        bank.take_batch(0, 1, 2, 0)
        bank.record_version(1, 0)
        bank.commit_step(0, 0, 1)
        assert bank.take_batch(1, 1, 2, 1) is None
        bank.peek_ready(2), bank.admitted(), bank.current_version(), bank.open_groups(), bank.list_running()
        bank.abandon_running("end")
        assert (bank.counts()["stale"], bank.counts()["trained"]) == (3, 2)
    assert len(plans) > 50
    tables = tuple(f"SCAN {table}" for table in ("trajectories", "groups", "payloads", "prompts"))
    scans = {
        plan for plan in plans if plan[1].startswith(tables) and "ix_trajectories_running" not in plan[1]
    }
    assert not scans, scans


# ---------------------------------------------------------------- ages after a resume


def test_a_group_is_as_old_as_the_version_with_the_fewest_updates_in_it(bank: Bank) -> None:
    """Versions 1..3 were lost; 4 was made from 0, so it is one update old, younger by id and older than 3."""
    for version in (1, 2, 3):
        bank.record_version(version, version - 1)
    bank.record_version(4, 0)
    assert [version.updates for version in bank.versions()] == [0, 1, 2, 3, 1]
    assert [version.version for version in bank.versions(above=2)] == [3, 4]
    collect_group(bank, "lost", version=3)
    collect_group(bank, "made after it", version=4)
    assert ids(bank.take_batch(0, 1, 2, min_updates=2)) == ["lost.0", "lost.1"]
    assert bank.counts()[State.STALE] == 2


def test_two_resumes_in_a_row_lose_nothing_that_is_within_the_bound(bank: Bank) -> None:
    """Killed twice at version 6 with a checkpoint of 2: what waited of 5 and 6 is trained after the repeated steps."""
    for step in range(6):
        collect_group(bank, f"g{step}", version=step)
        _train(bank, step)
    collect_group(bank, "w5", version=5)
    collect_group(bank, "w6", version=6)
    for _ in range(2):
        bank.rollback_uncommitted(1)
        bank.set_current_version(2)
        for step in range(2, 6):
            _train(bank, step)
    assert _train(bank, 6) == ["w5.0", "w5.1"]
    assert _train(bank, 7) == ["w6.0", "w6.1"]


def test_after_repeated_steps_without_an_update_the_bound_holds(bank: Bank) -> None:
    """The last repeated step makes no version, so the engines get that of the step before: it grows old like any."""
    for step in range(3):
        collect_group(bank, f"g{step}", version=step)
        _train(bank, step)
    bank.rollback_uncommitted(-1)
    bank.set_current_version(0)
    _train(bank, 0)
    _train(bank, 1)  # version 5, two updates
    assert bank.take_batch(2, 1, 2, 0) is not None
    bank.commit_step(2, 5, 5)
    collect_group(bank, "of 5", version=5)
    for version in (6, 7, 8):
        bank.record_version(version, version - 1)
    assert _train(bank, 3) is None and bank.counts()[State.STALE] == 2


def _train(bank: Bank, step: int, bound: int = 2) -> list[str] | None:
    """One step as the trainer makes it."""
    updates = {version.version: version.updates for version in bank.versions()}
    parent = bank.current_version()
    batch = bank.take_batch(step, 1, 2, updates[parent] - bound)
    if batch is None:
        return None
    made = bank.next_version()
    bank.record_version(made, parent, step)
    bank.commit_step(step, parent, made)
    return [t.trajectory_id for t in batch]


# ---------------------------------------------------------------- the order of start


def test_a_group_waits_for_older_ones_where_it_may_not_overtake_them(bank: Bank) -> None:
    bank.start_trajectories([running("slow.0", "slow"), running("slower.0", "slower")])
    collect_group(bank, "quick")
    assert bank.take_batch(0, 1, 2, 0, overtaking=1) is None
    bank.close_group("slow", keep=False)
    assert ids(bank.take_batch(0, 1, 2, 0, overtaking=1)) == ["quick.0", "quick.1"]


def test_a_trajectory_whose_version_went_back_is_found_by_its_last_one(bank: Bank) -> None:
    bank.record_version(1, 0)
    back = running("back", "b")
    bank.start_trajectory(back)
    back.append_action([4, 5], [-0.5, -0.5], [VersionSpan(1, 0, 1), VersionSpan(0, 1, 2)])
    bank.checkpoint_trajectory(back)
    assert [t.trajectory_id for t in bank.list_sampled_by(0)] == ["back"]
    assert bank.list_sampled_by(1) == []
