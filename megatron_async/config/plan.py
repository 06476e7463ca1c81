"""What a run needs of each accelerator, machine and network link, and whether it fits.

Invariants: sums are upper bounds where a share differs between ranks (rank 0 gathers weights to publish them); a need
that is not known is left out and the text says so; `memory_problems` shows the sum that is too large, term by term.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megatron_async.config.activations import Activations, activations_on_stage
from megatron_async.config.estimate import (
    GIB,
    Memory,
    bytes_text,
    critic_on_stage,
    kv_bytes_per_token,
    memory_on_stage,
    parameters_of,
    weight_width,
)
from megatron_async.config.hf import ModelShape
from megatron_async.config.methods import ADVANTAGES, DIFFERENCES
from megatron_async.config.placement import place
from megatron_async.config.schema import LayoutConfig, RunConfig

_FP32 = 4
EXPORT_BUCKET = 256 * 2**20
"""Whole tensors that rank 0 gathers at once (`engine/hf_export.py`)."""
FULL_COPIES_BEYOND_WINDOW = 3

CHANGED_WEIGHTS = ((1e-6, 0.042), (5e-6, 0.15), (1e-4, 0.87))
"""(learning rate, share of bf16 weights whose bits differ after the first Adam step): measured on simulated updates
with random gradients; later steps change less."""
_BYTES_PER_CHANGE = 3
"""A 16-bit offset and the low byte of the difference (docs/snapshots.md)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A sum of needs against what is there. Sizes in bytes; capacity 0: not known, everything fits."""

    what: str
    needs: tuple[tuple[str, float], ...]
    capacity: float
    why_capacity: str = ""

    @property
    def total(self) -> float:
        return sum(size for _, size in self.needs)

    @property
    def fits(self) -> bool:
        return not self.capacity or self.total <= self.capacity

    def text(self) -> str:
        """`a 1 GiB + b 2 GiB = 3 GiB`, and the capacity where it is known."""
        sum_text = " + ".join(f"{name} {bytes_text(size)}" for name, size in self.needs if size)
        told = f" of {bytes_text(self.capacity)} ({self.why_capacity})" if self.capacity else ""
        return f"{sum_text} = {bytes_text(self.total)}{told}"


def changed_share(lr: float) -> float:
    """Share of bf16 weights one update changes: `CHANGED_WEIGHTS`, linear in the logarithm of the learning rate."""
    if lr <= CHANGED_WEIGHTS[0][0]:
        return CHANGED_WEIGHTS[0][1]
    for (low, share), (high, more) in zip(CHANGED_WEIGHTS, CHANGED_WEIGHTS[1:], strict=False):
        if lr <= high:
            return share + (more - share) * math.log(lr / low) / math.log(high / low)
    return 1.0


def largest_tensor(shape: ModelShape) -> int:
    """Elements of the largest tensor that is published on its own."""
    widths = (shape.vocabulary, shape.heads * shape.head_dim, shape.intermediate, shape.expert_intermediate)
    return shape.hidden * max(widths)


def trainer_budget(shape: ModelShape, config: RunConfig, stage: int) -> Budget:
    """Memory of each trainer rank of a pipeline stage."""
    held, width = memory_on_stage(shape, config, stage), weight_width(config)
    activations = _activations(shape, config, config.layout, stage)
    source = config.old_logits.source
    masters = held.optimizer * _FP32 / (3 * _FP32 if width != _FP32 else 2 * _FP32)
    tensor = width * largest_tensor(shape)
    whole = publish_bytes(shape, config)  # no bucket is larger than the model
    buckets = (max(EXPORT_BUCKET, tensor), max(config.publish.bucket_bytes, tensor))
    gathered = sum(2 * min(size, whole) for size in buckets)
    needs = (
        ("weights", held.weights),
        ("gradients", held.gradients),
        ("optimiser", held.optimizer),
        ("activations", activations.layers),
        (
            "logits" if activations.logits > activations.recomputed else "a layer again",
            max(activations.logits, activations.recomputed),
        ),
        ("history: shadow", held.weights if keeps_shadow(config) else 0),
        ("history: records", config.snapshots.device_bytes if source in DIFFERENCES else 0),
        ("average", masters if source == "ewma" else 0),
        ("reference", held.weights if config.objective.kl_coefficient > 0 else 0),
        ("critic", critic_on_stage(shape, config, stage).total if _shares_critic(config) else 0),
        ("publishing", gathered if stage == 0 else 0),
    )
    return _training_budget("trainer", config, config.layout, stage, needs)


def _activations(shape: ModelShape, config: RunConfig, layout: LayoutConfig, stage: int) -> Activations:
    return activations_on_stage(
        shape,
        layout,
        stage,
        tokens=config.trainer.micro_batch_tokens,
        width=weight_width(config),
        recompute=config.trainer.recompute,
        fused=config.cluster.devices_per_node > 0,
    )


def _training_budget(
    part: str, config: RunConfig, layout: LayoutConfig, stage: int, needs: tuple[tuple[str, float], ...]
) -> Budget:
    cluster = config.cluster
    return Budget(
        f"{part} rank" if layout.pipeline_model_parallel_size == 1 else f"{part} rank of stage {stage}",
        needs,
        cluster.device_memory_gib * GIB * (1 - cluster.headroom),
        f"{cluster.device_memory_gib:g} GiB less {cluster.headroom:.0%}",
    )


def critic_budget(shape: ModelShape, config: RunConfig, stage: int) -> Budget:
    """Memory of each of the critic's own ranks of a pipeline stage."""
    layout, held = config.critic_layout, critic_on_stage(shape, config, stage)
    # Its head makes one number of a token.
    activations = _activations(replace(shape, vocabulary=1), config, layout, stage)
    needs = (
        ("weights", held.weights),
        ("gradients", held.gradients),
        ("optimiser", held.optimizer),
        ("activations", activations.total),
    )
    return _training_budget("critic", config, layout, stage, needs)


def _shares_critic(config: RunConfig) -> bool:
    """Whether a critic lives on the trainer's ranks."""
    return ADVANTAGES[config.advantage.name].needs_critic and config.critic.ranks == "shared"


def keeps_shadow(config: RunConfig) -> bool:
    """Whether a trainer rank holds a copy of its weights to compare versions with (`snapshots.shadow`)."""
    if config.old_logits.source not in DIFFERENCES:
        return False
    return config.model.dtype == "float32" if config.snapshots.shadow is None else config.snapshots.shadow


def scorer_budget(shape: ModelShape, config: RunConfig, stage: int) -> Budget:
    """Memory of each rank of a dedicated old-logit model: the policy's weights and history, and a forward pass."""
    trainer = trainer_budget(shape, config, stage)
    needs = dict(trainer.needs)
    forward = logits_bytes(shape, config, stage)
    # It makes no updates of its own: it compares with a copy what arrives.
    kept = {
        "weights": needs["weights"],
        "history: shadow": needs["weights"],
        "history: records": needs["history: records"],
    }
    return Budget(
        f"dedicated {trainer.what.removeprefix('trainer ')}",
        (*kept.items(), ("logits", forward)),
        trainer.capacity,
        trainer.why_capacity,
    )


def logits_bytes(shape: ModelShape, config: RunConfig, stage: int) -> float:
    """Bytes of the logits of one micro-batch on a rank; 0 before the last pipeline stage."""
    if stage < config.layout.pipeline_model_parallel_size - 1:
        return 0.0
    row = weight_width(config) * shape.vocabulary / config.layout.tensor_model_parallel_size
    return config.trainer.micro_batch_tokens * row


def engine_budget(shape: ModelShape, config: RunConfig) -> Budget:
    """Memory of each accelerator of an engine."""
    ranks, width = config.engines.tensor_parallel_size, weight_width(config)
    # Fewer key-value heads than ranks are copied, not cut.
    cache = kv_bytes_per_token(shape, width) / min(ranks, shape.kv_heads)
    cluster = config.cluster
    return Budget(
        f"engine rank (1 of {ranks})",
        (
            ("weights", width * parameters_of(shape).total / ranks),
            (f"KV of {config.engines.max_total_tokens:,} tokens", cache * config.engines.max_total_tokens),
        ),
        cluster.device_memory_gib * GIB * config.engines.mem_fraction_static,
        f"{cluster.device_memory_gib:g} GiB * mem_fraction_static {config.engines.mem_fraction_static:g}",
    )


def host_budget(shape: ModelShape, config: RunConfig) -> Budget:
    """Memory that history and checkpoints take on a machine with trainer ranks."""
    weights = max(budget.weights for budget in _stages(shape, config))
    copies = config.rollout.max_staleness + FULL_COPIES_BEYOND_WINDOW
    source = config.old_logits.source
    each = weights if source in DIFFERENCES else copies * weights if source == "snapshot_full" else 0
    if config.snapshots.host_bytes is not None and each:
        each = config.snapshots.host_bytes
    trainers = max(node.trainer_ranks for node in place(config))
    ranks, copy = trainers * (2 if source == "dedicated" else 1), checkpoint_copy_bytes(shape, config)
    critics = config.critic_layout.world_size if config.critic.ranks == "own" else 0
    critic_copy = _copy_bytes(config, (critic_on_stage(shape, config, stage) for stage in critic_stages(config)))
    return Budget(
        "machine with trainer ranks",
        (
            (f"history of {ranks} rank(s) * {bytes_text(each)}", ranks * each),
            (f"checkpoint copies of {trainers} rank(s) * {bytes_text(copy)}", trainers * copy),
            (f"of {critics} critic rank(s) * {bytes_text(critic_copy)}", critics * critic_copy),
        ),
        config.cluster.host_memory_gib * GIB,
        "host memory",
    )


def checkpoint_copy_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Host memory of a rank into which a save in the background copies: weights, fp32 masters and two moments.

    An upper bound: ranks that hold the same parameters are counted each, as Megatron gathers the shards of optimisers
    on all of them before the first of them writes.
    """
    return _copy_bytes(config, _stages(shape, config))


def _copy_bytes(config: RunConfig, stages: Iterable[Memory]) -> int:
    if config.checkpoint.every == 0 or not config.checkpoint.asynchronous:
        return 0
    return (weight_width(config) + 3 * _FP32) * max(held.parameters.total for held in stages)


def _stages(shape: ModelShape, config: RunConfig) -> Iterator[Memory]:
    for stage in range(config.layout.pipeline_model_parallel_size):
        yield memory_on_stage(shape, config, stage)


def critic_stages(config: RunConfig) -> range:
    """Pipeline stages of the ranks that the critic lives on."""
    return range(config.critic_layout.pipeline_model_parallel_size)


def budgets(shape: ModelShape, config: RunConfig) -> list[Budget]:
    """Every sum that must fit: ranks of the first and last pipeline stage, of a dedicated model, of a critic (if it has
    ranks of its own), of an engine; and a machine of the trainer."""
    last = config.layout.pipeline_model_parallel_size - 1
    stages = [trainer_budget(shape, config, stage) for stage in sorted({0, last})]
    dedicated = [scorer_budget(shape, config, last)] if config.old_logits.source == "dedicated" else []
    own = critic_stages(config) if config.critic.ranks == "own" else range(0)
    critics = [critic_budget(shape, config, stage) for stage in sorted({*own[:1], *own[-1:]})]
    return [*stages, *dedicated, *critics, engine_budget(shape, config), host_budget(shape, config)]


def memory_problems(shape: ModelShape, config: RunConfig) -> list[str]:
    """What does not fit, with its sum and what to change; empty when everything does or capacities are not known."""
    problems = []
    for budget in budgets(shape, config):
        if budget.fits:
            continue
        over = bytes_text(budget.total - budget.capacity)
        problems.append(
            f"{budget.what} does not fit, {over} too much: {budget.text()}; {_remedy(budget.what)}"
        )
    return problems


def _remedy(what: str) -> str:
    if what.startswith(("trainer", "dedicated", "critic")):
        of_critic = " of critic.layout" if what.startswith("critic") else ""
        return (
            f"set trainer.recompute, lower trainer.micro_batch_tokens, or raise a parallel size{of_critic} "
            "(expert_model_parallel_size for experts, tensor or pipeline for the rest, world_size for the optimiser)"
        )
    if what.startswith("engine"):
        return "raise engines.tensor_parallel_size or mem_fraction_static, or lower engines.max_total_tokens"
    return (
        "lower snapshots.host_bytes, use old_logits.source: snapshot, which keeps differences, or set "
        "checkpoint.asynchronous: false, which copies nothing and waits for the disk"
    )


def publish_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Bytes of weights that reach every engine with each version."""
    return weight_width(config) * parameters_of(shape).total


def history_bytes_per_version(shape: ModelShape, config: RunConfig) -> float:
    """Expected bytes of one version's differences over the whole model, uncompressed, at the run's learning rate."""
    return changed_share(config.optimizer.lr) * parameters_of(shape).total * _BYTES_PER_CHANGE


def plan_text(shape: ModelShape, config: RunConfig) -> list[str]:
    """The sums as text, one line each."""
    lines = [f"  {budget.what}: {budget.text()}" for budget in budgets(shape, config) if budget.total]
    every = config.publish.every
    lines.append(
        f"  publishing: {bytes_text(publish_bytes(shape, config))} of weights to each of {config.engines.count} "
        f"engine(s), after every {'step' if every == 1 else f'{every} steps'}"
    )
    if config.old_logits.source in DIFFERENCES and weight_width(config) != _FP32:
        share = changed_share(config.optimizer.lr)
        lines.append(
            f"  history: about {bytes_text(history_bytes_per_version(shape, config))} per version over all ranks "
            f"({share:.1%} of the weights at lr {config.optimizer.lr:g}, {_BYTES_PER_CHANGE} bytes "
            "each; from simulated updates)"
        )
    return lines
