"""Watches a run's bank from outside while it is hit by faults, and says in the end what was lost or trained twice.

It trusts no counter: it remembers the state of every trajectory that it ever saw, and compares.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from megatron_async.bank import Bank, State, dialects
from megatron_async.bank.tables import payloads, steps, trajectories
from megatron_async.trajectory import Trajectory, TrajectoryError

KEPT = (State.FINISHED.value, State.RESERVED.value, State.TRAINED.value)
LEGITIMATE = (State.STALE.value, State.FILTERED.value)
_LOOK_S = 0.1


@dataclass(slots=True)
class Findings:
    """lost: trajectories that had finished and are gone, failed, running again or unreadable. doubled: trained in two
    steps. stale, filtered: finished ones that the bank set aside by its rules."""

    finished: int = 0
    trained: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    stale: int = 0
    filtered: int = 0
    continued: int = 0
    restarted: int = 0


class Watch:
    """Looks at the bank ten times a second, in a thread of its own, between `start` and `stop`."""

    def __init__(self, url: str) -> None:
        self._engine = dialects.make_engine(url)
        self._finished: set[str] = set()
        self._step: dict[str, int] = {}
        self._findings = Findings()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.committed = 0
        """Steps that were ever committed."""
        self.last_news = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> Findings:
        """The last look, and the verdict."""
        self._over.set()
        self._thread.join()
        self._look()
        self._read_all()
        self._engine.dispose()
        self._findings.finished, self._findings.trained = len(self._finished), len(self._step)
        return self._findings

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            try:
                self._look()
            except DBAPIError:
                time.sleep(_LOOK_S)  # its own connection may be cut, or the tables not be there yet

    def _look(self) -> None:
        with self._engine.connect() as conn:
            query = select(trajectories.c.trajectory_id, trajectories.c.state, trajectories.c.step)
            rows = {row.trajectory_id: row for row in conn.execute(query)}
            done = select(steps.c.step).where(steps.c.state == "committed")
            committed = set(conn.execute(done).scalars())
        for name in self._finished:
            row = rows.get(name)
            if (row is None or row.state not in KEPT + LEGITIMATE) and name not in self._findings.lost:
                self._findings.lost.append(name)
        for name, row in rows.items():
            if row.state in KEPT:
                self._finished.add(name)
            trained = row.state == State.TRAINED.value and row.step in committed
            if trained and self._step.setdefault(name, row.step) != row.step and name not in self._findings.doubled:
                self._findings.doubled.append(name)
        self._findings.stale = sum(row.state == State.STALE.value for row in rows.values())
        self._findings.filtered = sum(row.state == State.FILTERED.value for row in rows.values())
        newest = max(committed, default=-1) + 1
        if newest > self.committed:
            self.committed, self.last_news = newest, time.monotonic()

    def _read_all(self) -> None:
        """What finished must also be readable, and whole."""
        query = select(trajectories.c.trajectory_id, payloads.c.data)
        query = query.join(payloads, payloads.c.position == trajectories.c.position)
        with self._engine.connect() as conn:
            found = {row.trajectory_id: row.data for row in conn.execute(query.where(trajectories.c.state.in_(KEPT)))}
        for name in sorted(self._finished):
            try:
                trajectory = Trajectory.from_bytes(found[name]) if name in found else None
            except TrajectoryError:
                self._findings.lost.append(name)
                continue
            if trajectory is not None:
                self._findings.continued += "continued_at" in trajectory.info
                self._findings.restarted += "restarted_from" in trajectory.info


def steps_are_whole(bank: Bank, wanted: int, batch: int) -> bool:
    """Every step is committed once, with a whole batch."""
    found = bank.steps()
    once = [(step.step, step.state) for step in found] == [(number, "committed") for number in range(wanted)]
    return once and all(step.trajectories == batch for step in found)


