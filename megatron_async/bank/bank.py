"""The durable store between rollout and training.

Invariants
- A trajectory is trained in at most one committed step, and none that finished is lost: every change is one
  transaction that is on the disk when the call returns, so a kill of any process at any point leaves either the
  state before the call or the state after it.
- States follow the machine in `states.py`; the database enforces it.
- A batch holds complete groups only, oldest first, without a token older, in updates, than asked for.
- Polling (`current_version`, `counts`, `admitted`, `peek_ready`, `places`) reads a few rows, however large the bank is.

Any number of processes and threads may use one bank, each through its own `Bank.open`. A method blocks for as long
as its transaction takes (milliseconds); an asyncio program calls it in a thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import DBAPIError, OperationalError

from megatron_async.bank import (
    batches,
    collecting,
    copying,
    dialects,
    filtering,
    groups,
    ledger,
    scores,
    states,
)
from megatron_async.bank.batches import Places, Step
from megatron_async.bank.claims import Claims
from megatron_async.bank.errors import BankAway, BankOpenError
from megatron_async.bank.filtering import Filtered
from megatron_async.bank.groups import OpenGroup
from megatron_async.bank.ledger import Version
from megatron_async.bank.states import State
from megatron_async.bank.tables import SCHEMA, metadata, schema, state_counts, versions
from megatron_async.passwords import hide_password
from megatron_async.trajectory import Trajectory

RECONNECT_S = 60
"""Longest wait for a database that is away or has no disk left, in seconds; a server that restarts takes a few."""

RECONNECT_PAUSE_S = 0.2

_MAKE_WAY_PAUSE_S = 0.02  # by chance, so that two that met do not meet again

T = TypeVar("T")


class Admitted(NamedTuple):
    """Trajectories ever accepted (finished, reserved or trained) and those running."""

    accepted: int
    running: int


class Place(NamedTuple):
    """Prompts of a stream: those from `at` up to `after`. most: trajectories that may run and wait in all."""

    cursor: str
    at: int
    after: int
    most: int


class Issued(NamedTuple):
    """Whether the trajectories were started, and where the cursor stands now."""

    started: bool
    cursor: int


class Bank:
    """See the module. Every method raises BankError when it would break an invariant, and then changes nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writer = dialects.writing(engine)
        self._claims = Claims(engine, self.get_state, self.set_state)

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the bank at a SQLAlchemy URL, creating its tables if they are not there.

        sqlite:///relative/path or sqlite:////absolute/path for one machine; postgresql://user@host/name for several.
        Raises BankOpenError when the database cannot be reached or was laid out by another release.
        """
        bank = cls(dialects.make_engine(url))
        try:
            bank._transact(bank._writer, lambda conn: _create(conn, url), retry_s=0)
        except OperationalError as error:
            bank.close()
            raise BankAway(
                f"cannot open the bank at {hide_password(url)!r}: {error.orig}. For SQLite the folder must exist and "
                "be writable; for PostgreSQL the server must run and the database exist"
            ) from error
        return bank

    @classmethod
    def open_to_read(cls, url: str) -> Self:
        """Open a bank that is there only to read it: the database itself refuses what would write.

        Raises BankOpenError when there is none, or it was laid out by another release.
        """
        bank = cls(dialects.make_engine(url, read_only=True))
        try:
            number = bank._transact(bank._engine, _layout, retry_s=0)
        except DBAPIError as error:
            bank.close()
            raise BankOpenError(f"cannot read the bank at {hide_password(url)!r}: {error.orig}") from error
        _check_layout(number, url)
        return bank

    def copy_to(self, file: Path) -> None:
        """Copy everything, as it is at one moment, into a new SQLite file; of a bank opened by `open_to_read`."""
        copying.copy(self._engine, file)

    def close(self) -> None:
        self._claims.release_all()
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ rollout

    def start_trajectory(self, trajectory: Trajectory) -> None:
        """Record a new running trajectory; its prompt and group are recorded with their first member."""
        self.start_trajectories([trajectory])

    def start_trajectories(self, batch: Sequence[Trajectory]) -> None:
        """`start_trajectory` for many in one transaction."""

        def work(conn: Connection) -> None:
            for trajectory in batch:
                collecting.start(conn, trajectory)

        self._write(work)

    def issue(
        self, batch: Sequence[Trajectory], place: Place, states: Mapping[str, str] | None = None
    ) -> Issued:
        """Start trajectories for the next prompts of a stream that several rollout processes may draw from.

        Started, they are recorded and the prompts are issued in one transaction, wherever a kill falls. Nothing happens
        when others have issued prompts from `place.at` on, or what runs and waits would become more than `place.most`.
        states: `set_state`, with it.
        """

        def work(conn: Connection) -> Issued:
            at = ledger.lock_cursor(conn, place.cursor)
            if at != place.at or collecting.in_play(conn) + len(batch) > place.most:
                return Issued(False, at)
            for trajectory in batch:
                collecting.start(conn, trajectory)
            for key, value in (states or {}).items():
                ledger.write_key(conn, key, value)
            ledger.write_cursor(conn, place.cursor, place.after)
            return Issued(True, place.after)

        return self._write(work)

    def checkpoint_trajectory(self, trajectory: Trajectory) -> None:
        """Write down the present tokens of a running trajectory: what a kill of the rollout leaves to resume from."""
        self.checkpoint_trajectories([trajectory])

    def checkpoint_trajectories(self, batch: Sequence[Trajectory]) -> None:
        """`checkpoint_trajectory` for many in one transaction: one sync of the disk for all of them."""
        self._write(lambda conn: collecting.checkpoint(conn, batch))

    def finish_trajectory(self, trajectory: Trajectory) -> State:
        """Record a finished trajectory and return its state.

        FINISHED: it waits to be trained. FAILED: its status is a failure, or it has no reward or no action token;
        its group then needs another member. FILTERED: its group was done without it.
        """
        return self.finish_trajectories([trajectory])[0]

    def finish_trajectories(self, batch: Sequence[Trajectory]) -> list[State]:
        """`finish_trajectory` for many in one transaction: one sync of the disk for all of them, or none recorded."""

        def work(conn: Connection) -> list[State]:
            updates = collecting.updates_behind(conn, batch)
            groups.lock_all(conn, {trajectory.group_id for trajectory in batch})
            return [collecting.finish(conn, trajectory, updates) for trajectory in batch]

        return self._write(work)

    def states_of(self, trajectory_ids: Sequence[str]) -> dict[str, State]:
        """States of the named trajectories; one that is not there is left out."""
        return self._read(lambda conn: collecting.states_of(conn, trajectory_ids))

    def list_running(self, group_ids: Collection[str] | None = None) -> list[Trajectory]:
        """Running trajectories (of the named groups only) as last written down, oldest first; after a kill these are
        the partial ones."""
        found = self._read(lambda conn: collecting.running(conn, group_ids))
        return [Trajectory.from_bytes(data) for data in found]

    def abandon_running(self, reason: str, trajectory_ids: Sequence[str] | None = None) -> int:
        """Fail every running trajectory (or the named ones), as a restarted rollout does with what it cannot resume.

        Returns how many. With several rollout processes on one bank, name the trajectories.
        """
        return self._write(lambda conn: collecting.abandon(conn, reason, trajectory_ids))

    def open_groups(self) -> list[OpenGroup]:
        """Groups that are not done, in the order they were started: those with too few members are completed first."""
        return self._read(groups.unfinished)

    def unfinished_groups(self, group_size: int | None = None) -> list[str]:
        """Names of the groups that are not done, or that have running members; without those that are complete with so
        many members and only wait to be trained. Reads no other group's row."""
        return self._read(lambda conn: groups.names_unfinished(conn, group_size))

    def close_group(
        self, group_id: str, *, keep: bool, reason: str = "group given up", fewest: int = 1
    ) -> int:
        """Let a group get no further members: the policy for one whose members keep failing.

        keep: train it as it is once its running members end (a batch then holds fewer than groups * group_size
        trajectories), unless it has fewer than `fewest` that wait or run. Otherwise its waiting members are filtered.
        Returns how many members wait for training.
        """
        return self._write(lambda conn: groups.close(conn, group_id, fewest if keep else None, reason))

    def admitted(self) -> Admitted:
        """Counts for admission; accepted never falls except by stale and filtered trajectories."""
        n = self.counts()
        return Admitted(n[State.FINISHED] + n[State.RESERVED] + n[State.TRAINED], n[State.RUNNING])

    def save_cursor(self, name: str, value: int) -> None:
        """Remember how far a data source was read."""
        self._write(lambda conn: ledger.write_cursor(conn, name, value))

    def load_cursor(self, name: str) -> int:
        """The saved value; 0 when none was saved."""
        return self._read(lambda conn: ledger.read_cursor(conn, name) or 0)

    # ------------------------------------------------------------------ training

    def take_batch(
        self,
        step: int,
        groups: int,
        group_size: int,
        min_updates: int,
        max_filtered: int = 0,
        overtaking: int | None = None,
    ) -> list[Trajectory] | None:
        """Reserve the oldest `groups` complete groups under `step`; None while fewer wait. One transaction.

        Complete groups with a token whose version has fewer than `min_updates` updates behind it become stale first,
        also when None is returned. Then up to `max_filtered` groups per step, over all calls for it, are filtered if
        their rewards are all equal, and later ones take their place (`filtered` counts them). overtaking: a group that
        has more than so many older, incomplete ones before it waits for them (None: it never does). Members
        beyond `group_size` are filtered. The order (groups by age, members by age) is the recorded one when a step is
        trained again. Raises BankError when the step holds a batch already, or is committed.
        """
        found = self._write(
            lambda conn: batches.take(conn, step, groups, group_size, min_updates, max_filtered, overtaking)
        )
        return None if found is None else [Trajectory.from_bytes(data) for data in found]

    def filtered(self, step: int) -> Filtered:
        """Groups without variance that made room while the batch of `step` was built."""
        return self._read(lambda conn: filtering.of_step(conn, step))

    def peek_ready(self, group_size: int) -> int:
        """Complete groups that wait, stale ones not yet marked included."""
        return self._read(lambda conn: batches.ready(conn, group_size))

    def places(self, groups: int, group_size: int) -> Places:
        """Empty places in batches of so many groups, and how many batches were taken: what admission has to count
        beside trajectories, where groups are kept without members that failed."""
        return self._read(lambda conn: batches.places(conn, groups, group_size))

    def list_waiting(self, known: Container[str], min_updates: int, max_tokens: int) -> list[Trajectory]:
        """Finished trajectories that wait to be trained, oldest first, without those whose id is known.

        At most `max_tokens` tokens in all (one trajectory at least), none with a token whose version has fewer than
        `min_updates` updates behind it. Reads the row of every waiting trajectory; nothing is reserved or changed.
        """
        found = self._read(lambda conn: batches.waiting(conn, known, min_updates, max_tokens))
        return [Trajectory.from_bytes(data) for data in found]

    def waiting_ids(self) -> set[str]:
        """Ids of the trajectories that `list_waiting` would find, whatever their age."""
        return self._read(batches.waiting_ids)

    def list_unscored(
        self, known: Container[str], min_version: int, max_version: int, max_tokens: int
    ) -> list[Trajectory]:
        """As `list_waiting`, with those of the batch in hand first, and no token of an id outside these."""
        bounds = (min_version - 1, max_version)  # a batch in hand was built one version before
        found = self._read(lambda conn: batches.unscored(conn, known, bounds, max_tokens))
        return [Trajectory.from_bytes(data) for data in found]

    def list_sampled_by(self, version: int) -> list[Trajectory]:
        """Running trajectories, as last written down, and waiting ones whose last token is of `version`."""
        found = self._read(lambda conn: batches.sampled_by(conn, version))
        return [each for data in found if (each := Trajectory.from_bytes(data)).last_version == version]

    def save_scores(self, rows: Mapping[str, tuple[int, bytes]], oldest: int) -> None:
        """Keep old log-probs by trajectory id, as (oldest version of its tokens, bytes).

        Those with a token older than `oldest` are forgotten.
        """
        self._write(lambda conn: scores.save(conn, rows, oldest))

    def load_scores(self, trajectory_ids: Sequence[str] | None = None) -> dict[str, tuple[int, bytes]]:
        """What `save_scores` kept, of all trajectories or of those named that have any."""
        return self._read(lambda conn: scores.load(conn, trajectory_ids))

    def commit_step(
        self, step: int, version_before: int, version_after: int, metrics: dict[str, Any] | None = None
    ) -> None:
        """The step is trained for good: its trajectories are never handed out again."""
        self._write(lambda conn: batches.commit(conn, step, version_before, version_after, metrics or {}))

    def rollback_uncommitted(self, checkpoint_step: int | None = None) -> int:
        """On resume: trajectories of steps that were not committed wait again. Returns how many.

        checkpoint_step: last step contained in the checkpoint that is resumed. Steps committed after it are not in
        the weights any more; `take_batch` hands their recorded batches out again, in the same order. Raises
        TokensDiscarded when the tokens of one of them were discarded.
        """
        return self._write(lambda conn: batches.rollback(conn, checkpoint_step))

    def steps(self) -> list[Step]:
        return self._read(batches.recorded)

    def steps_trained(self) -> int:
        """Number of steps that were ever trained, on the way that the run is on."""
        return sum(step.state != "reserved" for step in self.steps())

    def discard_payloads(self, through_step: int) -> int:
        """Delete the tokens (not the records) of trajectories nobody can ask for again; returns how many.

        through_step: last step of the oldest checkpoint one may still resume from. Deleted are those that were trained
        up to it, and those that never will be (stale, filtered, failed). From then on a `rollback_uncommitted` to an
        older checkpoint is refused.
        """
        return self._write(lambda conn: batches.discard_payloads(conn, through_step))

    def discarded_through(self) -> int:
        """Last step whose batch `discard_payloads` may have deleted; -1 while all are there."""
        return self._read(ledger.discarded_through)

    # ------------------------------------------------------------------ versions and shared state

    def record_version(self, version: int, parent: int | None, step: int | None = None) -> None:
        """Record a version, before any engine samples with it, and make it the current one.

        Version 0, the starting checkpoint, is there from the beginning. Raises BankError for an id not above all ids
        ever recorded, or an unknown parent.
        """
        self._write(lambda conn: ledger.record_version(conn, version, parent, step))

    def current_version(self) -> int:
        """The version recorded last, or set by `set_current_version` on a resume."""
        return self._read(ledger.current_version)

    def set_current_version(self, version: int) -> None:
        """On resume: the checkpoint's version is current again; the next id is still above all recorded ones."""
        self._write(lambda conn: ledger.set_current(conn, version))

    def next_version(self) -> int:
        """The lowest id not used yet."""
        return self._read(lambda conn: ledger.newest_version(conn) + 1)

    def versions(self, above: int = -1) -> list[Version]:
        """Every version with an id above the given one, oldest first."""
        return self._read(lambda conn: ledger.versions_above(conn, above))

    def set_state(self, key: str, value: str) -> None:
        """Write to the small key-value table shared by all processes (such as the phase of the run)."""
        self._write(lambda conn: ledger.write_key(conn, key, value))

    def set_states(self, values: Mapping[str, str]) -> None:
        """`set_state` for several keys in one transaction."""

        def work(conn: Connection) -> None:
            for key, value in sorted(values.items()):  # one order of locks for everybody
                ledger.write_key(conn, key, value)

        self._write(work)

    def get_state(self, key: str) -> str | None:
        return self._read(lambda conn: ledger.read_key(conn, key))

    def get_states(self, keys: Sequence[str]) -> dict[str, str]:
        """Those of the keys that were set."""
        return self._read(lambda conn: ledger.read_keys(conn, keys))

    def claim(self, name: str) -> bool:
        """Hold a name for this process; False while another one does.

        It is given back by `release`, by `close`, and by the end of the process, however that comes. A PostgreSQL
        server that restarts forgets it, see `keeps`.
        """
        return self._claims.claim(name)

    def keeps(self, name: str) -> bool:
        """Whether this process has held a name ever since it claimed it, as far as anybody else could tell.

        What a cut connection lost is taken again, unless another process claimed it meanwhile, even if for a moment.
        True also while the server is away: ask again.
        """
        return self._claims.keeps(name)

    def is_free(self, name: str) -> bool:
        """Whether no process, this one included, holds a name."""
        return self._claims.is_free(name)

    def release(self, name: str) -> None:
        """Give a claimed name back; nothing happens where it is not held."""
        self._claims.release(name)

    def counts(self) -> dict[str, int]:
        """Trajectories per state, every state named."""
        rows = self._read(lambda conn: conn.execute(select(state_counts)).all())
        return {state.value: next(row.n for row in rows if row.state == state) for state in State}

    # ------------------------------------------------------------------ transactions

    def signs_of_life(self) -> tuple[int, ...]:
        """Changes whenever a rollout begins or ends an attempt, or writes down what running ones hold by now."""
        return self._read(collecting.signs_of_life)

    def _write(self, work: Callable[[Connection], T]) -> T:
        return self._transact(self._writer, work, RECONNECT_S)

    def _read(self, work: Callable[[Connection], T]) -> T:
        return self._transact(self._engine, work, RECONNECT_S)

    def _transact(self, engine: Engine, work: Callable[[Connection], T], retry_s: float) -> T:
        """Run `work` as one transaction; again, while the connection is lost before it was asked to commit, the disk
        is full, or the database chose it to make way for another: both have undone the transaction.

        A connection lost during the commit leaves it open whether the commit happened: that error is not retried.
        """
        deadline = time.monotonic() + retry_s
        while True:
            committing = False
            try:
                with engine.begin() as conn:
                    with states.counted(conn):
                        result = work(conn)
                    committing = True
                return result
            except DBAPIError as error:
                away = dialects.connection_lost(error) and not committing
                makes_way = dialects.makes_way(error)
                if not (away or makes_way or dialects.disk_full(error)) or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0, _MAKE_WAY_PAUSE_S) if makes_way else RECONNECT_PAUSE_S)


def _create(conn: Connection, url: str) -> None:
    dialects.lock_schema(conn)
    metadata.create_all(conn)
    number = _layout(conn)
    if number is not None:
        _check_layout(number, url)
        return
    conn.execute(schema.insert().values(number=SCHEMA))
    conn.execute(state_counts.insert(), [{"state": state.value, "n": 0} for state in State])
    conn.execute(versions.insert().values(version=0, parent=None, updates=0, step=None, created_at=time.time()))
    dialects.create_state_trigger(conn)


def _layout(conn: Connection) -> int | None:
    return conn.execute(select(schema.c.number)).scalar_one_or_none()


def _check_layout(number: int | None, url: str) -> None:
    if number != SCHEMA:
        raise BankOpenError(
            f"the bank at {hide_password(url)!r} has layout {number}, this release reads {SCHEMA}: open it with the "
            "release that wrote it, or start a new run"
        )
