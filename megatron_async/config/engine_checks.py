"""What is wrong with the options of the engines, before half a minute is spent on starting them."""

from __future__ import annotations

from megatron_async.config.schema import RunConfig


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    return host in ("localhost", "::1") or host.startswith("127.")


def engine_problems(config: RunConfig) -> list[str]:
    """What would keep the engines from running, or the run from surviving one; empty when nothing does."""
    engines, problems = config.engines, []
    if engines.quorum > engines.count:
        problems.append(
            f"engines.quorum: {engines.quorum} engines are needed to go on, but engines.count starts {engines.count}"
        )
    if engines.router and config.cluster.engine_nodes:
        problems.append(
            "engines.router: the router runs beside engines of one machine; set cluster.engine_nodes to 0, or leave "
            "the spreading to the rollout (router: false)"
        )
    return problems
