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
