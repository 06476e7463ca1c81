"""A resolved configuration in words: ranks and machines, batch arithmetic, memory. What a dry run prints."""

from __future__ import annotations

import math

from megatron_async.config.estimate import parameters_of
from megatron_async.config.hf import read_shape
from megatron_async.config.placement import placement_text
from megatron_async.config.plan import plan_text
from megatron_async.config.schema import LayoutConfig, RunConfig


def _layout_text(layout: LayoutConfig) -> list[str]:
    return [
        f"            tensor {layout.tensor_model_parallel_size} * pipeline {layout.pipeline_model_parallel_size} * "
        f"context {layout.context_parallel_size} * data {layout.data_parallel_size}",
        f"            expert {layout.expert_model_parallel_size} * expert-tensor {layout.expert_tensor_parallel_size} "
        f"* pipeline {layout.pipeline_model_parallel_size} * expert-data {layout.expert_data_parallel_size}",
    ]


def _critic_text(config: RunConfig) -> list[str]:
    if config.critic.ranks == "shared":
        return []
    layout = config.critic_layout
    return [f"  critic    {layout.world_size} rank(s) of its own on the first machine", *_layout_text(layout)]


def _ranks_text(config: RunConfig) -> list[str]:
    layout, trainer = config.layout, config.trainer
    return [
        f"  trainer   {layout.world_size} rank(s) = {trainer.nodes} node(s) * {trainer.nproc_per_node}",
        *_layout_text(layout),
        *_critic_text(config),
        f"  engines   {config.engines.count} SGLang server(s) * tensor {config.engines.tensor_parallel_size}",
        f"  rollout   1 process, {config.rollout.concurrency} trajectories at once",
    ]


def _batch_text(config: RunConfig) -> list[str]:
    batch, layout, updates = config.batch, config.layout, config.trainer.updates_per_batch
    each = batch.trajectories // layout.data_parallel_size
    room = config.trainer.micro_batch_tokens * layout.context_parallel_size
    most = batch.trajectories * config.rollout.max_tokens
    return [
        f"  step      {batch.groups} groups * {batch.group_size} = {batch.trajectories} trajectories, "
        f"{each} per data-parallel rank, {updates} update(s)",
        f"            at most {batch.trajectories} * {config.rollout.max_tokens} = {most:,} tokens, "
        f"packed into micro-batches of {room:,}",
        f"  run       {config.steps} steps = {config.steps * updates} updates, "
        f"{config.steps * batch.trajectories:,} trajectories trained on",
        _staleness_text(config),
    ]


def _staleness_text(config: RunConfig) -> str:
    rollout, batch = config.rollout, config.batch
    text = f"  staleness at most {rollout.max_staleness} version(s): "
    if rollout.admission == "drop":
        return f"{text}what is older when a batch is built is dropped (rollout.admission drop)"
    extra = math.ceil(rollout.over_sampling * batch.groups) * batch.group_size
    admitted = (rollout.max_staleness + 1) * batch.trajectories + extra
    more = f" + {extra}" if extra else ""
    return (
        f"{text}({rollout.max_staleness} + 1) * {batch.trajectories}{more} = {admitted} trajectories running or waiting"
    )


def describe(config: RunConfig) -> str:
    """Ranks, machines, batch arithmetic and memory of a resolved configuration, as text."""
    lines = ["Ranks", *_ranks_text(config), *placement_text(config), "Batch", *_batch_text(config), "Memory"]
    shape = read_shape(config.model.path)
    if shape is None:
        return "\n".join([*lines, f"  unknown: {config.model.path} has no readable config.json"])
    whole = parameters_of(shape)
    model = f"  model: {whole.total:,} parameters, {whole.experts:,} of them in experts"
    last = "  the runtime, communication buffers and an uneven load of experts come on top; estimates, not measurements"
    return "\n".join([*lines, model, *plan_text(shape, config), last])
