"""What the bank's tests share: short trajectories and a look at the tables behind the bank's back."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, func, select, text

from megatron_async.bank import Bank, dialects
from megatron_async.bank.tables import groups, payloads, state_counts, trajectories
from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan


def running(trajectory_id: str, group_id: str, prompt_id: str | None = None) -> Trajectory:
    trajectory = Trajectory(
        trajectory_id, group_id, prompt_id or f"prompt-{group_id}", SamplingParams(), {"seed": 1}
    )
    trajectory.append_context([1, 2, 3])
    return trajectory


def end(
    trajectory: Trajectory, version: int = 0, status: Status = Status.OK, reward: float | None = 1.0
) -> Trajectory:
    trajectory.append_action([4, 5], [-0.5, -0.25], [VersionSpan(version, 0, 2)], "stop")
    trajectory.finish(status, reward if status.trainable else None)
    return trajectory


def collect(bank: Bank, trajectory_id: str, group_id: str, version: int = 0, **kwargs: Any) -> Trajectory:
    """Start and finish one trajectory in the bank."""
    trajectory = running(trajectory_id, group_id)
    bank.start_trajectory(trajectory)
    bank.finish_trajectory(end(trajectory, version, **kwargs))
    return trajectory


def collect_group(bank: Bank, group_id: str, size: int = 2, version: int = 0) -> list[str]:
    return [collect(bank, f"{group_id}.{i}", group_id, version).trajectory_id for i in range(size)]


def states(url: str) -> dict[str, str]:
    """State of every trajectory, read past the bank."""
    return {row.trajectory_id: row.state for row in _rows(url, select(trajectories))}


def steps_of(url: str) -> dict[str, int | None]:
    return {row.trajectory_id: row.step for row in _rows(url, select(trajectories))}


def trajectories_with_tokens(url: str) -> dict[int | None, int]:
    """How many trajectories of each step still have their tokens."""
    kept = select(trajectories.c.step, func.count().label("n")).join(
        payloads, payloads.c.position == trajectories.c.position
    )
    return {row.step: row.n for row in _rows(url, kept.group_by(trajectories.c.step))}


def check_consistent(url: str) -> None:
    """Counts kept beside the trajectories must equal a count of the trajectories."""
    real = {row.state: row.n for row in _rows(url, _by_state())}
    kept = {row.state: row.n for row in _rows(url, select(state_counts)) if row.n}
    assert kept == real, f"counts per state {kept}, counted {real}"
    members: dict[int, dict[str, int]] = {}
    for row in _rows(url, select(trajectories)):
        group = members.setdefault(row.group_position, {"running": 0, "finished": 0, "failed": 0})
        if row.state in group:
            group[row.state] += 1
    for row in _rows(url, select(groups)):
        kept_group = {"running": row.running, "finished": row.waiting, "failed": row.failed}
        assert members.get(row.position, {"running": 0, "finished": 0, "failed": 0}) == kept_group, row
    if url.startswith("sqlite"):
        assert [tuple(row) for row in _rows(url, text("PRAGMA integrity_check"))] == [("ok",)]


def _by_state() -> Any:
    return select(trajectories.c.state, func.count().label("n")).group_by(trajectories.c.state)


def _rows(url: str, query: Any) -> list[Any]:
    if url not in _views:
        _views[url] = dialects.make_engine(url)
    with _views[url].connect() as conn:
        return list(conn.execute(query).all())


def close_view(url: str) -> None:
    """Drop the connection that the looks at `url` share."""
    if url in _views:
        _views.pop(url).dispose()


_views: dict[str, Engine] = {}
