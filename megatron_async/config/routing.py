"""Whether what is to be replayed in the routers is recorded at all."""

from __future__ import annotations

from megatron_async.config.schema import RunConfig


def routing_problems(config: RunConfig) -> list[str]:
    """Refuse a replay that would find no record and fall back for every sequence."""
    if config.trainer.routing_replay == "rollout" and not config.engines.routed_experts:
        return [
            "trainer.routing_replay: rollout replays the experts that the engines record, but "
            "engines.routed_experts is false; set it to true"
        ]
    return []


def routing_warnings(config: RunConfig) -> list[str]:
    """A replay that changes nothing."""
    if config.trainer.routing_replay == "trainer" and config.trainer.updates_per_batch == 1:
        return [
            "trainer.routing_replay: trainer with one update per batch replays the experts that the update would "
            "choose anyway, and costs a forward pass; set it to off, or trainer.updates_per_batch > 1"
        ]
    return []
