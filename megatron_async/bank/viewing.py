"""Reading a bank for people: summaries of trajectories, and one trajectory whole. Changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Engine, select

from megatron_async.bank.errors import BankError
from megatron_async.bank.states import State
from megatron_async.bank.tables import groups, payloads, trajectories
from megatron_async.trajectory import Trajectory


class Summary(NamedTuple):
    """One trajectory's row, without its tokens."""

    trajectory_id: str
    group_id: str
    state: str
    status: str
    reward: float | None
    tokens: int
    action_tokens: int
    min_version: int | None
    max_version: int | None
    step: int | None
    reason: str | None


def latest(engine: Engine, count: int) -> list[Summary]:
    """The `count` trajectories started last, newest first; those without any token come after all others."""
    row = trajectories.c
    query = (
        select(
            row.trajectory_id, groups.c.group_id, row.state, row.status, row.reward, row.tokens, row.action_tokens,
            row.min_version, row.max_version, row.step, row.reason,
        )
        .join(groups, groups.c.position == row.group_position)
        .order_by(row.tokens == 0, row.position.desc())
        .limit(count)
    )  # fmt: skip
    with engine.connect() as conn:
        return [Summary(*found) for found in conn.execute(query)]


def find(engine: Engine, trajectory_id: str) -> Trajectory:
    """The trajectory with that id; raises BankError when it is not there or its tokens were discarded."""
    query = (
        select(payloads.c.data)
        .join(trajectories, trajectories.c.position == payloads.c.position)
        .where(trajectories.c.trajectory_id == trajectory_id)
    )
    with engine.connect() as conn:
        data = conn.execute(query).scalar_one_or_none()
    if data is None:
        raise BankError(f"the bank holds no tokens of a trajectory {trajectory_id!r}")
    return Trajectory.from_bytes(data)


def finish_times(engine: Engine) -> list[float]:
    """When each trajectory ended, failed ones included (Unix seconds), in order."""
    at = trajectories.c.finished_at
    with engine.connect() as conn:
        return [float(time) for time in conn.execute(select(at).where(at.is_not(None)).order_by(at)).scalars()]


class Finished(NamedTuple):
    """A trajectory that was played to its end, and when it ended (Unix seconds)."""

    trajectory: Trajectory
    finished_at: float


def finished(engine: Engine, count: int) -> list[Finished]:
    """The `count` trainable trajectories that finished last (trained ones included), newest first."""
    row = trajectories.c
    query = (
        select(payloads.c.data, row.finished_at)
        .join(trajectories, row.position == payloads.c.position)
        .where(row.state.in_([State.FINISHED.value, State.RESERVED.value, State.TRAINED.value]))
        .order_by(row.position.desc())
        .limit(count)
    )
    with engine.connect() as conn:
        return [Finished(Trajectory.from_bytes(data), float(at)) for data, at in conn.execute(query)]
