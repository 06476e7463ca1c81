"""One process as any rank of any world: groups without peers, models without memory.

Invariants: nothing is sent and no weight is allocated; the model is made by the code that makes it in a run
(`engine/model.py`), so its parameters have the shapes that rank would have; on leaving, no process group is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_async.config.schema import LayoutConfig, RunConfig
from megatron_async.engine import platform
from megatron_async.engine.hf_config import HFConfig
from megatron_async.errors import UserError

if TYPE_CHECKING:  # it imports Megatron, which must wait for `platform.setup`
    from megatron_async.engine.policy import Policy


class PlanningError(UserError):
    """A plan cannot be made in this process."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the model a rank holds; ranks with equal shards hold the same weights."""

    tensor: int
    stage: int
    expert: int
    expert_tensor: int


@contextlib.contextmanager
def rank_of(layout: LayoutConfig, rank: int) -> Iterator[Shard]:
    """Be rank `rank` of the layout's world while the block runs; collectives return at once and move nothing.

    Raises:
        PlanningError: this process is in a process group already, or the world has no such rank.
        PlatformError: the layout cannot be formed.
    """
    if dist.is_initialized():
        raise PlanningError("this process belongs to a process group already; plan in a process of its own")
    if not 0 <= rank < layout.world_size:
        raise PlanningError(f"rank {rank} is not in a world of {layout.world_size}")
    platform.setup()  # before Megatron is imported below
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        platform.init_distributed(layout, seed=0)
        yield _shard()
    finally:
        platform.shutdown()


def _shard() -> Shard:
    from megatron.core import parallel_state

    return Shard(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
    )


def build_policy(config: RunConfig) -> Policy:
    """This rank's policy without weights, inside `rank_of`: for its parameters' names, shapes and pieces only.

    Only the checkpoint's `config.json` is read.
    """
    from megatron_async.engine.model import build_chunks, transformer_config
    from megatron_async.engine.policy import Policy

    class WeightlessPolicy(Policy):
        def load_hf(self, path: str | Path) -> None:
            """There is nothing to load into."""

    hf = HFConfig.from_pretrained(config.model.path)
    megatron = transformer_config(hf, config.model, config.layout, config.trainer)
    chunks = build_chunks(hf, megatron, device=torch.device("meta"))
    return WeightlessPolicy(
        hf,
        megatron,
        chunks,
        None,
        model_config=config.model,
        layout=config.layout,
        trainer=config.trainer,
    )
