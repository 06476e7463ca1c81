"""What is wrong with the options of the engines, before half a minute is spent on starting them."""

from __future__ import annotations

from megatron_async.config.schema import RunConfig


def engine_problems(config: RunConfig) -> list[str]:
    """What would keep the engines from running, or the run from surviving one; empty when nothing does."""
    engines, problems = config.engines, []
    if not engines.host or any(sign in engines.host for sign in "[]/ "):
        problems.append(
            f"engines.host: {engines.host!r} is no address; use one like 127.0.0.1, ::1 or a host's name, without port "
            "and brackets, or 0.0.0.0 for all of them"
        )
    if engines.quorum > engines.count:
        problems.append(
            f"engines.quorum: {engines.quorum} engines are needed to go on, but engines.count starts {engines.count}"
        )
    if engines.router and config.cluster.engine_nodes:
        problems.append(
            "engines.router: the router runs beside engines of one machine; set cluster.engine_nodes to 0, or leave "
            "the spreading to the rollout (router: false)"
        )
    return problems + _drain_problems(config)


def _drain_problems(config: RunConfig) -> list[str]:
    """Why `publish.pause_mode: drain` cannot work here."""
    publish, problems = config.publish, []
    if publish.pause_mode != "drain":
        return []
    if not 1 <= publish.drain_at_once < config.engines.count:
        problems.append(
            f"publish.drain_at_once: {publish.drain_at_once} of engines.count {config.engines.count} would be drained "
            "at a time, but at least one must be drained and one go on serving; start more engines, or set "
            "publish.pause_mode to retract"
        )
    if not 0 < publish.drain_s <= config.trainer.deadline_s:
        problems.append(
            f"publish.drain_s: {publish.drain_s:g} s must be above 0 and within trainer.deadline_s "
            f"({config.trainer.deadline_s:g} s), for which the trainer's ranks wait for one another"
        )
    if config.engines.router:
        problems.append(
            "publish.pause_mode: drain needs to choose the engine of a request by its version, which a router does not "
            "know; set engines.router to false, or pause_mode to retract"
        )
    return problems
