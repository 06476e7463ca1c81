"""Old log-probs scored while their version was resident, kept until the trajectory is trained on or too old to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, delete, select

from megatron_async.bank import dialects
from megatron_async.bank.tables import scores


def save(conn: Connection, rows: Mapping[str, tuple[int, bytes]], oldest: int) -> None:
    """See `Bank.save_scores`."""
    conn.execute(delete(scores).where(scores.c.min_version < oldest))
    for trajectory_id, (min_version, data) in rows.items():
        row = {"trajectory_id": trajectory_id, "min_version": min_version, "data": data}
        dialects.upsert(conn, scores, "trajectory_id", row)


def load(conn: Connection, trajectory_ids: Sequence[str] | None) -> dict[str, tuple[int, bytes]]:
    """See `Bank.load_scores`."""
    query = select(scores)
    if trajectory_ids is not None:
        query = query.where(scores.c.trajectory_id.in_(trajectory_ids))
    return {row.trajectory_id: (row.min_version, row.data) for row in conn.execute(query)}
