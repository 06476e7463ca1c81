"""How the deadlines of rollout and trainer fit together.

An attempt lasts at most `rollout.trajectory_deadline_s`, and its environment then gets `rollout.turn_deadline_s` to
close; a member of a group gets `rollout.max_retries` + 1 attempts. The trainer does not wait for a whole member but for
signs of life (`Bank.signs_of_life`): it need only be more patient than one episode may be silent.
"""

from __future__ import annotations

from megatron_async.config.schema import RolloutConfig, RunConfig
from megatron_async.heart import BEAT_S


def member_s(rollout: RolloutConfig) -> float:
    """Longest time from the first attempt of a group's member to the end of its last one, in seconds; pauses between
    attempts and waits for a free place come on top."""
    return (rollout.max_retries + 1) * (rollout.trajectory_deadline_s + rollout.turn_deadline_s)


def longest_batch_wait_s(rollout: RolloutConfig) -> float:
    """How long the trainer waits for a batch in all, however much goes on, in seconds: a group may use up its attempts,
    and so may the one that takes its place."""
    return 2 * member_s(rollout)


def deadline_problems(config: RunConfig) -> list[str]:
    """Why parts that work would be given up; empty where they would not."""
    return _patience_problems(config) + _health_problems(config)


def _health_problems(config: RunConfig) -> list[str]:
    limit_s, least_s = config.trainer.health_deadline_s, 10 * BEAT_S
    if not 0 < limit_s < least_s:
        return []
    return [
        f"trainer.health_deadline_s: {limit_s:g} s is too short for processes that give a sign of life every "
        f"{BEAT_S:g} s; set it to at least {least_s:g}, or to 0 for no limit"
    ]


def _patience_problems(config: RunConfig) -> list[str]:
    rollout, turn = config.rollout, config.rollout.turn_deadline_s
    if rollout.flush_s > 0:
        silence, sum_of = 2 * turn + rollout.flush_s, f"turn_deadline_s {turn:g} + {turn:g} (a call of the environment "
        sum_of += f"that hangs, then its close) + flush_s {rollout.flush_s:g}"
    else:
        life = rollout.trajectory_deadline_s
        silence = life + turn
        sum_of = f"trajectory_deadline_s {life:g} (flush_s 0 writes nothing down before) + turn_deadline_s {turn:g}"
    if config.trainer.deadline_s > silence:
        return []
    return [
        f"trainer.deadline_s: {config.trainer.deadline_s:g} s is not more than an episode of the rollout may be silent "
        f"for: rollout.{sum_of} = {silence:g} s, so that one slow task would end the run; raise it above {silence:g}, "
        "or lower rollout.turn_deadline_s"
    ]
