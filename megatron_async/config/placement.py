"""Which process of a run lives on which machine and on which accelerators: arithmetic only, nothing is started.

Invariants: machines are numbered, the trainer's first, then those that hold only engines; no two processes share an
accelerator; trainer ranks take the first ones of a machine, in the order of their local rank, then as many ranks of a
dedicated old-logit model where there is one, then (on the first machine) the critic's where it has its own, then the
engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """One engine: its number in the run, the machine, and its accelerators there (empty: not assigned)."""

    index: int
    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """What one machine runs. trainer_devices is empty where none are assigned, or where it trains nothing;
    scorer_devices, of the dedicated old-logit model's ranks, also where the run has no such model; critic_devices also
    where the critic has no ranks of its own (critic_ranks is 0)."""

    number: int
    trainer_ranks: int
    trainer_devices: tuple[int, ...]
    engines: tuple[EngineSlot, ...]
    scorer_devices: tuple[int, ...] = ()
    critic_ranks: int = 0
    critic_devices: tuple[int, ...] = ()

    @property
    def leads(self) -> bool:
        """Runs rollout, bank and evaluation, and decides when the run ends."""
        return self.number == 0

    @property
    def devices(self) -> int:
        """Accelerators it uses."""
        own = len(self.trainer_devices) + len(self.scorer_devices) + len(self.critic_devices)
        return own + sum(len(engine.devices) for engine in self.engines)


def ranks_per_node(config: RunConfig) -> int:
    """Trainer ranks on each of the trainer's machines."""
    return config.trainer.nproc_per_node or config.layout.world_size // config.trainer.nodes


def place(config: RunConfig) -> list[Node]:
    """Every machine of the run, in order. Whether it fits is `placement_problems`'s question."""
    ranks, trainer_nodes = ranks_per_node(config), config.trainer.nodes
    assigned = config.cluster.devices_per_node > 0
    engine_nodes = config.cluster.engine_nodes
    each = config.engines.count // engine_nodes if engine_nodes else config.engines.count
    nodes = []
    for number in range(config.cluster.nodes(trainer_nodes)):
        trains = number < trainer_nodes
        hosts = number >= trainer_nodes if engine_nodes else number == 0
        first = (number - trainer_nodes) * each if engine_nodes else 0
        scorers = ranks if trains and config.old_logits.source == "dedicated" else 0
        critics = config.critic_layout.world_size if number == 0 and config.critic.ranks == "own" else 0
        first_critic = ranks + scorers
        offset = first_critic + critics if trains else 0
        engines = tuple(_slot(config, first + i, number, offset, i) for i in range(each if hosts else 0))
        nodes.append(
            Node(
                number,
                trainer_ranks=ranks if trains else 0,
                trainer_devices=tuple(range(ranks)) if trains and assigned else (),
                engines=engines,
                scorer_devices=tuple(range(ranks, first_critic)) if scorers and assigned else (),
                critic_ranks=critics,
                critic_devices=tuple(range(first_critic, offset)) if critics and assigned else (),
            )
        )
    return nodes


def _slot(config: RunConfig, index: int, node: int, offset: int, place_on_node: int) -> EngineSlot:
    size = config.engines.tensor_parallel_size
    if not config.cluster.devices_per_node:
        return EngineSlot(index, node, ())
    first = offset + place_on_node * size
    return EngineSlot(index, node, tuple(range(first, first + size)))


def placement_problems(config: RunConfig) -> list[str]:
    """What keeps the processes from having an accelerator each, with the arithmetic; empty when nothing does."""
    cluster, engines = config.cluster, config.engines
    if cluster.engine_nodes and engines.count % cluster.engine_nodes:
        return [
            f"engines.count: {engines.count} engines cannot be spread evenly over cluster.engine_nodes = "
            f"{cluster.engine_nodes} machines (remainder {engines.count % cluster.engine_nodes})"
        ]
    if not cluster.devices_per_node:
        return []
    return [
        f"cluster.devices_per_node: machine {node.number} has {cluster.devices_per_node} accelerators, but needs "
        f"{node.trainer_ranks} trainer rank(s) + {_beside(node)}{len(node.engines)} engine(s) * tensor "
        f"{engines.tensor_parallel_size} = {node.devices}"
        for node in place(config)
        if node.devices > cluster.devices_per_node
    ]


def _beside(node: Node) -> str:
    scorers = f"{len(node.scorer_devices)} rank(s) of the dedicated model + " if node.scorer_devices else ""
    return scorers + (f"{node.critic_ranks} rank(s) of the critic + " if node.critic_ranks else "")


def placement_text(config: RunConfig) -> list[str]:
    """One line for each machine."""
    return [f"  machine {node.number:<3} {_node_text(node)}" for node in place(config)]


def _node_text(node: Node) -> str:
    parts = []
    if node.trainer_ranks:
        first = node.number * node.trainer_ranks
        where = f" on {_span(node.trainer_devices)}" if node.trainer_devices else ""
        parts.append(f"trainer ranks {first}-{first + node.trainer_ranks - 1}{where}")
    if node.scorer_devices:
        parts.append(f"dedicated old-logit model on {_span(node.scorer_devices)}")
    if node.critic_ranks:
        where = f" on {_span(node.critic_devices)}" if node.critic_devices else ""
        parts.append(f"critic ranks 0-{node.critic_ranks - 1}{where}")
    for engine in node.engines:
        where = f" on {_span(engine.devices)}" if engine.devices else ""
        parts.append(f"engine {engine.index}{where}")
    if node.leads:
        parts.append("rollout, bank, evaluation")
    return "; ".join(parts)


def _span(devices: tuple[int, ...]) -> str:
    return f"device {devices[0]}" if len(devices) == 1 else f"devices {devices[0]}-{devices[-1]}"
