"""Checks that concern several fields at once, made before anything is started.

Invariants: `check` reports every problem in one ConfigError, with the arithmetic that fails; what is legal but likely
a mistake comes back as a warning; nothing is changed here.
"""

from __future__ import annotations

import ipaddress
import math
import socket

from megatron_async.config.deadlines import deadline_problems
from megatron_async.config.engine_checks import engine_problems
from megatron_async.config.errors import ConfigError
from megatron_async.config.hf import ModelShape, checkpoint_problems, read_shape
from megatron_async.config.layout_checks import (
    layout_problems,
    model_layout_problems,
    next_multiple,
    room_problems,
)
from megatron_async.config.objective_checks import advantage_problems, objective_problems, objective_warnings
from megatron_async.config.placement import placement_problems
from megatron_async.config.plan import memory_problems
from megatron_async.config.routing import routing_problems, routing_warnings
from megatron_async.config.schema import MOST_ROLLOUTS, RunConfig

# Ports of one server: HTTP, and up to this many that SGLang takes after it for its own processes.
_HIGHEST_PORT = 65535


def _check_model(config: RunConfig, shape: ModelShape) -> list[str]:
    problems = model_layout_problems(config.layout, shape)
    if shape.heads % config.engines.tensor_parallel_size:
        problems.append(
            f"engines.tensor_parallel_size: num_attention_heads = {shape.heads} is not divisible by "
            f"{config.engines.tensor_parallel_size}"
        )
    if shape.max_positions and config.rollout.max_tokens > shape.max_positions:
        problems.append(
            f"rollout.max_tokens: {config.rollout.max_tokens} is more than the model's max_position_embeddings = "
            f"{shape.max_positions}"
        )
    return problems


def _check_processes(config: RunConfig) -> list[str]:
    trainer, layout = config.trainer, config.layout
    if trainer.nodes < 1:
        return [f"trainer.nodes: {trainer.nodes} is not at least 1"]
    per_node = (
        trainer.nproc_per_node if trainer.nproc_per_node is not None else layout.world_size / trainer.nodes
    )
    if trainer.nodes * per_node != layout.world_size or layout.world_size % trainer.nodes:
        return [
            f"trainer: {trainer.nodes} node(s) * {per_node:g} processes = {trainer.nodes * per_node:g}, but "
            f"layout.world_size is {layout.world_size}; make the two equal"
        ]
    return []


def _check_batch(config: RunConfig) -> list[str]:
    batch, layout, updates = config.batch, config.layout, config.trainer.updates_per_batch
    sizes = {
        "batch.groups": batch.groups,
        "batch.group_size": batch.group_size,
        "trainer.updates_per_batch": updates,
    }
    small = [f"{name}: {size} is not at least 1" for name, size in sizes.items() if size < 1]
    if small or min(layout.world_size, layout.model_parallel_size) < 1 or layout.data_parallel_size < 1:
        return small
    problems, data = [], layout.data_parallel_size
    if batch.trajectories % data:
        problems.append(
            f"batch: groups {batch.groups} * group_size {batch.group_size} = {batch.trajectories} trajectories cannot "
            f"be shared equally by {data} data-parallel ranks (remainder {batch.trajectories % data}); with group_size "
            f"{batch.group_size}, set batch.groups to {_groups_that_fit(batch.groups, batch.group_size, data)}"
        )
    return problems + room_problems(config, layout)


def _groups_that_fit(groups: int, group_size: int, parts: int) -> int:
    step = parts // math.gcd(group_size, parts)
    return next_multiple(groups, step)


def _check_admission(config: RunConfig) -> list[str]:
    rollout, problems = config.rollout, []
    if rollout.window and rollout.admission != "window":
        problems.append(
            f"rollout.window: {rollout.window} is only read with rollout.admission window (it is {rollout.admission})"
        )
    if rollout.over_sampling and rollout.admission == "drop":
        problems.append(
            f"rollout.over_sampling: {rollout.over_sampling:g} has no meaning with rollout.admission drop, which "
            "starts groups whenever there is a place; set it to 0"
        )
    return problems


def _check_rollout(config: RunConfig) -> list[str]:
    rollout, problems = config.rollout, []
    at_least_one = ("concurrency", "max_turns", "max_new_tokens", "max_tokens")
    problems += [
        f"rollout.{name}: {getattr(rollout, name)} is not at least 1"
        for name in at_least_one
        if getattr(rollout, name) < 1
    ]
    if rollout.max_staleness < 0:
        problems.append(
            f"rollout.max_staleness: {rollout.max_staleness} is negative; 0 is synchronous training"
        )
    if 0 <= rollout.max_staleness < config.publish.every - 1:
        problems.append(
            f"rollout.max_staleness: {rollout.max_staleness} is too small for publish.every = {config.publish.every}: "
            f"the engines lag up to {config.publish.every - 1} versions behind, so no token would be young enough; set "
            f"max_staleness to at least {config.publish.every - 1}"
        )
    problems += _check_several_rollouts(config)
    problems += _check_admission(config)
    problems += _check_sampling(config)
    return problems


def _check_several_rollouts(config: RunConfig) -> list[str]:
    rollout, problems = config.rollout, []
    if not 0 <= rollout.process < MOST_ROLLOUTS:
        problems.append(f"rollout.process: {rollout.process} is outside 0 to {MOST_ROLLOUTS - 1}")
    if rollout.process and rollout.over_sampling:
        problems.append(
            f"rollout.process: {rollout.process} with rollout.over_sampling: {rollout.over_sampling:g}: which episodes "
            "are the slowest of a batch only one process can tell; run one rollout process, or set over_sampling to 0"
        )
    if rollout.process and config.old_logits.source == "interrupt":
        problems.append(
            f"rollout.process: {rollout.process} with objective.anchor: {config.objective.anchor}, for which one "
            "process answers what all trajectories hold so far; run one rollout process, or choose another anchor"
        )
    return problems


def _check_sampling(config: RunConfig) -> list[str]:
    rollout, problems = config.rollout, []
    if rollout.temperature <= 0:
        problems.append(
            f"rollout.temperature: {rollout.temperature} is not above 0; greedy sampling has no log-probs to train on"
        )
    if not 0 < rollout.top_p <= 1:
        problems.append(f"rollout.top_p: {rollout.top_p} is outside (0, 1]")
    if rollout.top_k != -1 and rollout.top_k < 1:
        problems.append(f"rollout.top_k: {rollout.top_k} is neither -1 (all) nor at least 1")
    if rollout.max_new_tokens > rollout.max_tokens:
        problems.append(
            f"rollout.max_new_tokens: one turn of {rollout.max_new_tokens} tokens is longer than a whole trajectory, "
            f"max_tokens = {rollout.max_tokens}"
        )
    if rollout.max_tokens > config.engines.max_total_tokens:
        problems.append(
            f"engines.max_total_tokens: a KV cache of {config.engines.max_total_tokens} tokens does not hold one "
            f"trajectory of rollout.max_tokens = {rollout.max_tokens}"
        )
    return problems


_POSITIVE = (
    "steps", "optimizer.lr", "trainer.micro_batch_tokens", "trainer.deadline_s", "trainer.stop_deadline_s",
    "engines.count",
    "engines.tensor_parallel_size", "engines.max_total_tokens", "engines.start_deadline_s",
    "engines.health_deadline_s", "engines.restart_window_s", "engines.quorum", "engines.max_in_flight",
    "publish.bucket_bytes",
    "publish.verify_every", "publish.every", "publish.deadline_s", "rollout.turn_deadline_s", "rollout.poll_s",
    "rollout.trajectory_deadline_s", "rollout.takeover_s", "evaluation.tasks", "evaluation.samples_per_task",
    "warm_start.demonstrations", "optimizer.adam_eps", "snapshots.threads", "cluster.join_deadline_s",
    "cluster.rendezvous_port", "checkpoint.keep_last",
)  # fmt: skip
_NOT_NEGATIVE = (
    "seed", "optimizer.weight_decay", "optimizer.clip_grad", "optimizer.lr_warmup_steps", "optimizer.min_lr",
    "rollout.max_retries", "rollout.window", "rollout.over_sampling",
    "engines.max_restarts", "rollout.flush_s", "trainer.max_restarts", "snapshots.device_bytes",
    "snapshots.keyframe_every", "snapshots.compression_level",
    "evaluation.every", "evaluation.temperature", "objective.kl_coefficient",
    "objective.entropy_coefficient", "warm_start.context_weight", "cluster.devices_per_node",
    "trainer.health_deadline_s", "trainer.stage_deadline_s",
    "cluster.device_memory_gib", "cluster.host_memory_gib", "cluster.engine_nodes", "checkpoint.every",
)  # fmt: skip


def _value(config: RunConfig, dotted: str) -> float:
    node: object = config
    for part in dotted.split("."):
        node = getattr(node, part)
    assert isinstance(node, int | float)
    return node


def _check_ranges(config: RunConfig) -> list[str]:
    problems = [
        f"{key}: {_value(config, key)} is not above 0" for key in _POSITIVE if not _value(config, key) > 0
    ]
    problems += [
        f"{key}: {_value(config, key)} is negative" for key in _NOT_NEGATIVE if _value(config, key) < 0
    ]
    for key in ("optimizer.adam_beta1", "optimizer.adam_beta2"):
        if not 0 <= _value(config, key) < 1:
            problems.append(f"{key}: {_value(config, key)} is outside [0, 1)")
    if not 0 < config.engines.mem_fraction_static < 1:
        problems.append(
            f"engines.mem_fraction_static: {config.engines.mem_fraction_static} is outside (0, 1)"
        )
    if config.optimizer.min_lr > config.optimizer.lr:
        problems.append(
            f"optimizer.min_lr: {config.optimizer.min_lr} is above optimizer.lr = {config.optimizer.lr}"
        )
    if not config.name or "/" in config.name or config.name in (".", ".."):
        problems.append(f"name: {config.name!r} cannot name a folder; use letters, digits, - and _")
    return problems


def is_local(host: str) -> bool:
    """Whether a host name means this machine alone or all its addresses."""
    if host in ("localhost", "0.0.0.0", "::"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may be anybody's


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return (
            probe.connect_ex((host, port)) != 0
            if host not in ("0.0.0.0", "::")
            else _can_bind(probe, host, port)
        )


def _can_bind(probe: socket.socket, host: str, port: int) -> bool:
    try:
        probe.bind((host, port))
    except OSError:
        return False
    return True


def _check_ports(config: RunConfig, starts_engines: bool) -> list[str]:
    engines = config.engines
    if engines.base_port == 0:
        return []
    ports = range(engines.base_port, engines.base_port + engines.count)
    if ports[0] < 1 or ports[-1] > _HIGHEST_PORT:
        return [
            f"engines.base_port: {engines.base_port} + {engines.count} server(s) reaches port {ports[-1]}, outside "
            f"[1, {_HIGHEST_PORT}]"
        ]
    if not starts_engines or not is_local(engines.host):
        return []
    taken = [port for port in ports if not port_is_free(engines.host, port)]
    if taken:
        return [
            f"engines.base_port: port(s) {', '.join(map(str, taken))} on {engines.host} are in use; stop what listens "
            "there, choose another base_port, or 0 to pick free ones"
        ]
    return []


def _warn(config: RunConfig, shape: ModelShape | None) -> list[str]:
    rollout, warnings = config.rollout, objective_warnings(config)
    if rollout.top_p < 1 or rollout.top_k != -1:
        warnings.append(
            f"rollout: top_p {rollout.top_p} and top_k {rollout.top_k} sample from a cut distribution, but log-probs "
            "are those of the whole one: every ratio is biased; set top_p 1.0 and top_k -1"
        )
    ceiling = (rollout.max_staleness + 1) * config.batch.trajectories
    if rollout.concurrency > ceiling and rollout.admission != "drop" and not rollout.over_sampling:
        warnings.append(
            f"rollout.concurrency: {rollout.concurrency} is never reached, since staleness admits (max_staleness "
            f"{rollout.max_staleness} + 1) * {config.batch.trajectories} = {ceiling} unfinished trajectories"
        )
    return warnings + _warn_places(config, shape)


def _warn_places(config: RunConfig, shape: ModelShape | None) -> list[str]:
    warnings = []
    if config.publish.pause_mode == "in_place" and config.objective.anchor != "rollout":
        warnings.append(
            "publish.pause_mode: in_place continues over the KV cache of older weights, so tokens after a switch have "
            "no exact old log-probs and are flagged; retract keeps them exact"
        )
    if config.trainer.nodes > 1 and config.bank_url.startswith("sqlite"):
        warnings.append(
            f"bank.url: {config.trainer.nodes} nodes share an SQLite file, which is safe only while all that open the "
            "bank run on one node; use a PostgreSQL address"
        )
    if config.bank.keep == "resumable" and config.checkpoint.every == 0:
        warnings.append(
            "checkpoint.every: 0 makes no generation, so bank.keep resumable deletes nothing: a resume trains every "
            "step again, and tokens, log-probs and routed experts of all trajectories stay; set it above 0"
        )
    if config.engines.routed_experts and shape is not None and not shape.is_moe:
        warnings.append("engines.routed_experts: true, but the model has no experts")
    return warnings + routing_warnings(config)


def _check_cluster(config: RunConfig) -> list[str]:
    if not 0 <= config.cluster.headroom < 1:
        return [f"cluster.headroom: {config.cluster.headroom} is outside [0, 1)"]
    return placement_problems(config) + routing_problems(config)


def check(config: RunConfig, *, starts_engines: bool = False, needs_weights: bool = True) -> list[str]:
    """Check a resolved configuration against itself, its checkpoint and (`starts_engines`) this machine's ports.

    needs_weights: False is content with the checkpoint's config.json, for plans.

    Returns warnings, one sentence each. Raises ConfigError listing everything that would fail later.
    """
    wrong_layout = layout_problems(config.layout)
    problems = _check_ranges(config) + wrong_layout + _check_processes(config) + _check_batch(config)
    problems += engine_problems(config) + _check_rollout(config) + deadline_problems(config)
    problems += objective_problems(config) + advantage_problems(config)
    if needs_weights:
        problems += [f"model.path: {problem}" for problem in checkpoint_problems(config.model.path)]
    shape = read_shape(config.model.path)
    if not problems:  # a size of 0 divides nothing
        problems += _check_cluster(config)
    if shape is not None and not wrong_layout:
        problems += _check_model(config, shape)
    if shape is not None and not problems:
        problems += memory_problems(shape, config)
    problems += _check_ports(config, starts_engines)
    if problems:
        raise ConfigError(problems)
    return _warn(config, shape)
