"""Dynamic sampling (DAPO): groups whose rewards are all equal make room for later ones.

Invariants
- A group is filtered for good, by the transaction that looks for a batch, also when the batch is not complete yet: its
  members leave the queue, so that admission lets others start in their place.
- At most so many groups per step as are allowed, over all calls and restarts: the count is kept under the step, in the
  same transaction. After that groups are taken as they come, so an endless stream of equal rewards stops nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection, func, select

from megatron_async.bank import groups, ledger
from megatron_async.bank.states import State, move
from megatron_async.bank.tables import trajectories


@dataclass(frozen=True, slots=True)
class Filtered:
    """Groups that were filtered while the batch of a step was built. reward_sum: of one reward of each."""

    groups: int = 0
    reward_sum: float = 0.0

    @property
    def reward_mean(self) -> float | None:
        """Mean reward of the filtered groups: near 0 the tasks are too hard, near 1 too easy. None without any."""
        return self.reward_sum / self.groups if self.groups else None


def of_step(conn: Connection, step: int) -> Filtered:
    """See `Bank.filtered`."""
    kept = ledger.read_key(conn, _key(step))
    return Filtered() if kept is None else msgspec.json.decode(kept, type=Filtered)


def choose(
    conn: Connection,
    step: int,
    wanted: int,
    group_size: int,
    min_updates: int,
    most: int,
    overtaking: int | None,
) -> list[int]:
    """Positions of up to `wanted` complete groups for the batch of `step`, locked, oldest first.

    Groups without variance among them are filtered until there is none, or `most` are. What is returned is what was
    looked at: a group that becomes complete in the meantime was not, and waits for the next batch.
    """
    found = of_step(conn, step)
    while True:
        oldest = groups.oldest_complete(conn, wanted, group_size, min_updates, overtaking)
        equal = _without_variance(conn, oldest)[: max(0, most - found.groups)]
        if not equal:
            return oldest
        positions = [position for position, _ in equal]
        reason = f"filtered: equal rewards when the batch of step {step} was built"
        move(conn, groups.waiting(conn, positions), State.FINISHED, State.FILTERED, reason=reason)
        groups.retire(conn, positions)
        found = Filtered(found.groups + len(equal), found.reward_sum + sum(reward for _, reward in equal))
        ledger.write_key(conn, _key(step), msgspec.json.encode(found).decode())


def _key(step: int) -> str:
    return f"bank/filtered/{step}"


def _without_variance(conn: Connection, positions: Sequence[int]) -> list[tuple[int, float]]:
    """(position, reward) of the groups whose waiting members all have one reward, in the given order."""
    least, largest = func.min(trajectories.c.reward), func.max(trajectories.c.reward)
    query = select(trajectories.c.group_position, least).where(
        trajectories.c.group_position.in_(positions), trajectories.c.state == State.FINISHED.value
    )
    rows = conn.execute(query.group_by(trajectories.c.group_position).having(least == largest)).all()
    rewards = {position: float(reward) for position, reward in rows}
    return [(position, rewards[position]) for position in positions if position in rewards]
