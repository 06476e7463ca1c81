"""How long an episode may get, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """When an episode is cut, and how patient it is.

    max_turns: policy turns. max_tokens: length of the whole trajectory, prompt and observations included (the budget
    of one turn is the trajectory's own `sampling.max_new_tokens`). turn_deadline_s: longest wait for one turn of the
    policy or one call of the environment. trajectory_deadline_s: longest life of the episode. max_retries: how often
    one turn's request may be repeated after an engine failed. stale_kv: the engines keep KV across weight updates
    (pause mode in_place), so tokens of a newer version are flagged with the KV's version. routed_experts: ask the
    engines for the experts of every token. mixed_versions: engines of two versions serve at a time (pause mode drain),
    so a turn must go to one that is no older than the turns before it.
    """

    max_turns: int
    max_tokens: int
    turn_deadline_s: float
    trajectory_deadline_s: float
    max_retries: int = 3
    stale_kv: bool = False
    routed_experts: bool = False
    mixed_versions: bool = False

    def of_policy(self) -> dict[str, int]:
        """What bounds the policy, for reports."""
        return {"max_turns": self.max_turns, "max_tokens": self.max_tokens}

    @classmethod
    def from_config(cls, config: RunConfig) -> EpisodeLimits:
        rollout = config.rollout
        return cls(
            max_turns=rollout.max_turns,
            max_tokens=rollout.max_tokens,
            turn_deadline_s=rollout.turn_deadline_s,
            trajectory_deadline_s=rollout.trajectory_deadline_s,
            max_retries=rollout.max_retries,
            stale_kv=config.publish.pause_mode == "in_place",
            routed_experts=config.engines.routed_experts,
            mixed_versions=config.publish.pause_mode == "drain",
        )
