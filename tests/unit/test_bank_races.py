"""What only happens when somebody else writes in between: each race is made to happen, on every database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy.exc import DBAPIError

from megatron_async.bank import Bank, BankError, State, batches, dialects, filtering, viewing
from megatron_async.trajectory import Status, Trajectory
from tests.bank_support import check_consistent, close_view, end, running
from tests.postgresql_server import PostgreSQLServer

STATUSES = [Status.OK, Status.ENGINE_ERROR, Status.ABORTED, Status.TRUNCATED]


@pytest.fixture
def url(postgresql_server: PostgreSQLServer) -> Iterator[str]:
    """PostgreSQL, where a statement sees what others committed since the one before."""
    url = postgresql_server.new_database()
    yield url
    check_consistent(url)
    close_view(url)


def between(monkeypatch: pytest.MonkeyPatch, module: object, name: str, event: Callable[[], object]) -> None:
    """Let `event` happen once, after the next call of the function."""
    original, due = getattr(module, name), [True]

    def called(*args: object) -> object:
        result = original(*args)
        if due:
            due.clear()
            event()
        return result

    monkeypatch.setattr(module, name, called)


def test_a_member_that_ends_while_a_batch_is_taken_is_checked_for_its_age(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bank.open(url) as bank, Bank.open(url) as rollout:
        for version in range(1, 6):
            bank.record_version(version, version - 1)
        bank.start_trajectories([running("a", "g"), running("b", "g")])
        bank.finish_trajectory(end(running("a", "g"), 5))
        long_one = end(running("b", "g"), 1)
        between(monkeypatch, batches, "_mark_stale", lambda: rollout.finish_trajectory(long_one))
        assert bank.take_batch(0, 1, 2, min_updates=3) is None
        assert bank.counts()[State.FINISHED] == 2  # it did complete its group in between
        assert bank.take_batch(0, 1, 2, min_updates=3) is None
        assert bank.counts()[State.STALE] == 2


def test_a_group_that_completes_while_a_batch_is_taken_is_looked_at_for_variance(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bank.open(url) as bank, Bank.open(url) as rollout:
        names = ("old.0", "old.1", "new.0", "new.1")
        bank.start_trajectories([running(name, name.partition(".")[0]) for name in names])
        for name, reward in (("old.0", 1.0), ("new.0", 0.0), ("new.1", 1.0)):
            bank.finish_trajectory(end(running(name, name.partition(".")[0]), reward=reward))
        equal = end(running("old.1", "old"), reward=1.0)
        between(monkeypatch, filtering, "_without_variance", lambda: rollout.finish_trajectory(equal))
        batch = bank.take_batch(0, 1, 2, min_updates=0, max_filtered=5)
        assert batch is not None and {t.group_id for t in batch} == {"new"}


def write_mixed(bank_url: str, writers: int, each: int) -> list[Exception]:
    """Many writers at once, whose transactions hold differently mixed outcomes; returns what went wrong."""
    errors: list[Exception] = []
    start = threading.Barrier(writers)

    def write(number: int) -> None:
        with Bank.open(bank_url) as own:
            start.wait()
            for turn in range(each):
                members = [
                    running(f"{number}.{turn}.{i}", f"g{number}.{turn}.{i}") for i in range(len(STATUSES))
                ]
                own.start_trajectories(members)
                shift = (number + turn) % len(STATUSES)
                outcomes = [*STATUSES[shift:], *STATUSES[:shift]]
                own.finish_trajectories([end(t, 0, s) for t, s in zip(members, outcomes, strict=True)])

    def guarded(number: int) -> None:
        try:
            write(number)
        except (BankError, DBAPIError) as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize(("writers", "each"), [(6, 6), pytest.param(64, 4, marks=pytest.mark.slow)])
def test_writers_of_mixed_outcomes_do_not_meet(bank_url: str, writers: int, each: int) -> None:
    with Bank.open(bank_url) as bank:
        assert write_mixed(bank_url, writers, each) == []
        total = writers * each
        wanted = {State.FINISHED: 2 * total, State.FAILED: 2 * total}
        assert bank.counts() == dict.fromkeys(State, 0) | wanted
    check_consistent(bank_url)
    close_view(bank_url)


def test_a_transaction_that_the_database_undid_for_another_is_done_again(url: str) -> None:
    """Two start members in each other's groups, in opposite orders: a deadlock, of which nobody hears."""
    with Bank.open(url) as one, Bank.open(url) as two:
        one.start_trajectories([running(f"{g}.0", g) for g in "ab"])
        met = threading.Barrier(2)
        errors: list[Exception] = []

        def start(bank: Bank, name: str, order: str) -> None:
            def members() -> Iterator[Trajectory]:
                yield running(f"{name}.0", order[0])
                if not errors and not done:
                    met.wait()  # both hold their first group
                    done.append(name)
                yield running(f"{name}.1", order[1])

            done: list[str] = []
            try:
                bank.start_trajectories(_Again(members))  # type: ignore[arg-type]
            except (BankError, DBAPIError) as error:
                errors.append(error)

        threads = [
            threading.Thread(target=start, args=arguments, daemon=True)
            for arguments in ((one, "x", "ab"), (two, "y", "ba"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert errors == [] and one.counts()[State.RUNNING] == 6


class _Again:
    """A sequence that is made anew each time it is walked through."""

    def __init__(self, make: Callable[[], Iterator[Trajectory]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Trajectory]:
        return self._make()


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", "\ud800"])
def test_text_from_outside_is_stored_alike_everywhere(bank_url: str, name: str) -> None:
    reason = f"tool raised ValueError: no such user x\0y\ud800 {'z' * 10_000}"
    with Bank.open(bank_url) as bank:
        first = Trajectory("a", "g", "prompt", running("a", "g").sampling)
        bank.start_trajectories([first])
        bank.abandon_running(reason, ["a"])
        assert bank.counts()[State.FAILED] == 1
        if "\ud800" not in name:  # which the trajectory's own bytes do not hold
            bank.start_trajectories([running("b", "long", name), running("c", "long", name)])
            (group,) = [g for g in bank.open_groups() if g.group_id == "long"]
            bank.start_trajectory(running("d", "long", group.prompt_id))  # as a rollout that goes on does
            with pytest.raises(RuntimeError, match="is of prompt"):
                bank.start_trajectory(running("e", "long", name + "x"))
            with pytest.raises(RuntimeError, match="at most 255 characters"):
                bank.start_trajectory(running(name, "g"))
            with pytest.raises(RuntimeError, match="at most 255 characters"):
                bank.start_trajectory(running("f", name, "prompt"))
    engine = dialects.make_engine(bank_url)
    stored = {row.trajectory_id: row.reason for row in viewing.latest(engine, 9)}["a"]
    engine.dispose()
    assert stored is not None and len(stored) == 4_000
    assert stored.startswith("tool raised ValueError: no such user x\ufffdy? zzz") and stored.endswith("z…")
    check_consistent(bank_url)
    close_view(bank_url)
