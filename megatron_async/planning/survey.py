"""Builds the model of every rank of a plan and compares their shares with the checkpoint and with the estimates.

Invariants: each distinct share is built once, since ranks that differ only in data or context parallel hold the same
weights; all ranks of the world are asked which share they hold.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_async.config.estimate import Parameters, parameters_of, parameters_on_stage
from megatron_async.config.hf import read_shape
from megatron_async.config.schema import RunConfig
from megatron_async.engine.hf_reader import INDEX_FILE
from megatron_async.engine.hf_weights import NameTable
from megatron_async.planning.coverage import Coverage
from megatron_async.planning.fake_world import PlanningError, Shard, build_policy, rank_of

if TYPE_CHECKING:  # see `fake_world`
    from megatron_async.engine.policy import Policy


@dataclass(frozen=True, slots=True)
class Share:
    """What the ranks of one shard hold. ranks: how many they are; first_rank: the lowest."""

    shard: Shard
    first_rank: int
    ranks: int
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class Survey:
    """Attributes:
    shares: one for each distinct shard, by first rank.
    tensors: tensors of the checkpoint.
    elements: elements the ranks hold, replicas counted once.
    problems: what does not add up; empty when everything does.
    """

    world_size: int
    shares: tuple[Share, ...]
    tensors: int
    elements: int
    problems: tuple[str, ...]

    def text(self) -> str:
        """Shares by pipeline stage, coverage, problems."""
        lines = [f"Ranks built on the meta device ({len(self.shares)} distinct of {self.world_size})"]
        for stage in sorted({share.shard.stage for share in self.shares}):
            totals = {
                share.parameters.total: share.parameters
                for share in self.shares
                if share.shard.stage == stage
            }
            for total, held in sorted(totals.items()):
                lines.append(
                    f"  stage {stage}: {total:,} parameters on each rank, {held.experts:,} of them in experts"
                )
        lines.append(
            f"  {self.tensors:,} tensors of the checkpoint, {self.elements:,} elements held"
            + ("; every tensor exactly once" if not self.problems else "")
        )
        return "\n".join([*lines, *(f"  PROBLEM: {problem}" for problem in self.problems)])


def survey(config: RunConfig) -> Survey:
    """Build every distinct share of the run's model and check that together they are the checkpoint.

    Reads `config.json`, and the names in the checkpoint's index if there is one.

    Raises:
        PlanningError: no readable config.json, or this process is in a process group.
        LayoutError, PlatformError, UnsupportedModelError: the model cannot be built so.
        WeightMismatch: the checkpoint's index names other tensors.
    """
    counts, firsts = _shards(config)
    shares, coverage, table = [], None, None
    for shard, rank in firsts.items():
        with rank_of(config.layout, rank):
            policy = build_policy(config)
            table = policy.table
            if coverage is None:
                coverage = Coverage(table, config.layout)
            pieces = {(piece.row.hf_name, piece.index) for piece in policy.pieces()}
            coverage.add(pieces, counts[shard])
            shares.append(Share(shard, rank, counts[shard], _count(policy)))
    assert coverage is not None and table is not None, "a world has at least one rank"
    problems = [*coverage.problems(), *_against_estimate(config, shares, coverage.elements)]
    _check_index(config, table)
    return Survey(
        config.layout.world_size, tuple(shares), len(table.rows), coverage.elements, tuple(problems)
    )


def _shards(config: RunConfig) -> tuple[Counter[Shard], dict[Shard, int]]:
    """How many ranks hold each shard, and the first of them."""
    counts: Counter[Shard] = Counter()
    firsts: dict[Shard, int] = {}
    for rank in range(config.layout.world_size):
        with rank_of(config.layout, rank) as shard:
            counts[shard] += 1
            firsts.setdefault(shard, rank)
    return counts, firsts


def _count(policy: Policy) -> Parameters:
    experts = dense = 0
    for name, parameter in policy.named_parameters():
        if policy.table.rows_of(name)[0].is_expert:
            experts += parameter.numel()
        else:
            dense += parameter.numel()
    return Parameters(dense, experts)


def _against_estimate(config: RunConfig, shares: list[Share], elements: int) -> list[str]:
    """Built ranks against the arithmetic that memory is estimated from."""
    shape = read_shape(config.model.path)
    if shape is None:
        raise PlanningError(f"{config.model.path} has no readable config.json")
    problems = []
    total = parameters_of(shape).total
    if elements != total:
        problems.append(f"the ranks hold {elements:,} elements, the model has {total:,} parameters")
    for share in shares:
        expected = parameters_on_stage(shape, config.layout, share.shard.stage)
        mixed = 0 < shape.moe_layers < shape.layers  # the estimate spreads both kinds evenly over the stages
        if share.parameters != expected and not mixed:
            problems.append(
                f"rank {share.first_rank} holds {share.parameters}, but the estimate of its stage is {expected}"
            )
    return problems


def _check_index(config: RunConfig, table: NameTable) -> None:
    """Names of the checkpoint's own index, where it has one. Raises WeightMismatch listing the difference."""
    file = Path(config.model.path) / INDEX_FILE
    if not file.is_file():
        return
    names: Mapping[str, str] = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    table.check_names(names, str(file))
