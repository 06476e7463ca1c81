"""What doing nothing scores: the number that every success rate is read against.

Some tasks ask the agent to refuse, so their gold state is the initial one. An agent that says a neutral sentence, or in
solo mode declares itself done at once, succeeds on them.

A task of one's own whose evaluation raises after that is not solved by doing nothing: the floor is made for a report,
and a report is written when everything has been played.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_async.rollout.environments.tau2 import reward
from megatron_async.rollout.environments.tau2.domain import Domain
from megatron_async.rollout.environments.tau2.episode import Episode, Said
from megatron_async.rollout.environments.tau2.users import STOP

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Floor:
    """successes: tasks that doing nothing solves. tasks: how many there are."""

    successes: int
    tasks: int

    @property
    def rate(self) -> float:
        """Share of tasks that doing nothing solves."""
        return self.successes / self.tasks if self.tasks else 0.0


def floor(domain: Domain, task_ids: Iterable[str], policy: str = "official") -> Floor:
    """Play every task with an agent that does nothing. Judged assertions are left out: nobody is asked. Tasks whose
    evaluation raises count as not solved, with a warning."""
    rewards = [_nothing(domain, task_id, policy) for task_id in task_ids]
    return Floor(sum(value >= 1.0 - 1e-6 for value in rewards), len(rewards))


def _nothing(domain: Domain, task_id: str, policy: str) -> float:
    episode = Episode(domain, domain.tasks[task_id])
    _do_nothing(episode)
    basis = reward.reward_basis(episode.task, "no_judge" if policy == "official" else policy)
    try:
        return reward.cached(episode, basis).reward
    except Exception as error:  # noqa: BLE001 - whatever an assertion of somebody's own task raises
        logger.warning(
            "tau2 task %s cannot be evaluated after doing nothing (%r): counted as not solved", task_id, error
        )
        return 0.0


def _do_nothing(episode: Episode) -> None:
    pending = episode.start()
    if episode.domain.solo:
        episode.agent(Said(calls=(("done", {}),)))
        return
    if pending.turn == "user":  # in a task that begins in the middle of a conversation the agent may be next
        episode.user(Said("Hello, I need help."))
    episode.agent(Said("Goodbye."))
    episode.user(Said(STOP))
