"""Random float64 batches for the objective tests: several sequences, padding with placeholders, every sign of Â."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_async.config.schema import ObjectiveConfig
from megatron_async.objectives import (
    BatchState,
    LossOutput,
    Normaliser,
    Objective,
    TokenBatch,
    build_objective,
)
from megatron_async.objectives.statistics import PREFIX

PLACEHOLDERS = (float("nan"), float("-inf"), -9999.0)
# Objectives of which a token's term depends on the rest of its sequence: (name, configuration).
SEQUENCE_WIDE: list[tuple[str, dict[str, Any]]] = [
    ("gspo", {"clip_low": 0.02, "clip_high": 0.02}),
    ("sat", {"options": {"level": "sequence", "quantile": 0.5}}),
    ("mis", {"options": {"level": "sequence", "veto": 0.3}}),
    ("mis", {"options": {"level": "geometric"}, "mask_low": 0.9, "mask_high": 1.1}),
    ("ppo", {"aggregation": "sequence_mean_token_mean"}),
]


@dataclass(frozen=True)
class Problem:
    """log π_θ (detached, [T]) and its batch."""

    logprobs: Tensor
    batch: TokenBatch

    @property
    def action(self) -> Tensor:
        return self.batch.action_mask


def random_problem(
    seed: int,
    *,
    discrepancy: float = 0.3,
    staleness: float = 0.3,
    lengths: tuple[int, ...] = (40, 1, 25, 70),
    placeholders: bool = True,
    drift: float = 0.0,
) -> Problem:
    """discrepancy, staleness: scale of log r_d and log r_s. drift: scale of a sequence's common part of both."""
    generator = torch.Generator().manual_seed(seed)

    def noise(size: int, scale: float) -> Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    total = sum(lengths)
    ids = torch.repeat_interleave(torch.arange(len(lengths)) * 7 + 3, torch.tensor(lengths))
    common = torch.repeat_interleave(noise(len(lengths), drift), torch.tensor(lengths))
    logprobs = -torch.rand(total, generator=generator, dtype=torch.float64) * 2 - 0.01
    anchor = logprobs + noise(total, staleness) + common
    rollout = anchor + noise(total, discrepancy) + common
    signs = torch.randint(-1, 2, (total,), generator=generator)
    advantages = signs * (torch.rand(total, generator=generator, dtype=torch.float64) + 0.1)
    action = torch.rand(total, generator=generator) > 0.3
    action[torch.tensor(lengths).cumsum(0) - 1] = (
        True  # every sequence has an action, also one of a single token
    )
    rewards = torch.repeat_interleave(
        torch.tensor([1.0, 0.0, 1.0, 0.0] * len(lengths))[: len(lengths)], torch.tensor(lengths)
    )
    gap = torch.randint(0, 4, (total,), generator=generator)
    batch = TokenBatch(
        rollout,
        anchor,
        advantages,
        action,
        ids,
        gap,
        reference_logprobs=logprobs + noise(total, 0.2),
        rewards=rewards,
    )
    problem = Problem(logprobs, batch)
    return with_placeholders(problem, seed) if placeholders else problem


def with_placeholders(problem: Problem, seed: int = 0) -> Problem:
    """NaN, -inf or -9999 in every float array off the action tokens."""
    off = ~problem.action

    def fill(values: Tensor, shift: int) -> Tensor:
        pattern = torch.tensor(PLACEHOLDERS, dtype=torch.float64)[
            (torch.arange(values.numel()) + seed + shift) % 3
        ]
        return torch.where(off, pattern, values)

    batch = problem.batch
    arrays = ("rollout_logprobs", "anchor_logprobs", "advantages", "reference_logprobs", "rewards")
    changed = {name: fill(getattr(batch, name).double(), shift) for shift, name in enumerate(arrays)}
    return Problem(fill(problem.logprobs, 1), replace(batch, **changed))


def select(problem: Problem, index: Tensor) -> Problem:
    """The tokens at `index`, in that order."""
    batch = problem.batch
    chosen = {
        f.name: None if getattr(batch, f.name) is None else getattr(batch, f.name)[index]
        for f in fields(TokenBatch)
    }
    return Problem(problem.logprobs[index], TokenBatch(**chosen))


def objective(name: str, **settings: Any) -> Objective:
    return build_objective(ObjectiveConfig(name=name, **settings))


def prepared(of: Objective, problem: Problem) -> BatchState | None:
    """The state of the whole batch when the objective wants one."""
    if "batch_statistics" not in of.needs:
        return None
    return of.prepare(problem.batch, problem.logprobs, lambda values: values)


def metrics_of(of: Objective, output: LossOutput) -> dict[str, float]:
    """The step's metrics without their common prefix."""
    return {name.removeprefix(PREFIX): value for name, value in of.summarise(output.stats).items()}


def run(
    of: Objective,
    problem: Problem,
    normaliser: Normaliser | None = None,
    state: BatchState | None = None,
    entropy: Tensor | None = None,
) -> tuple[LossOutput, Tensor]:
    """Loss and gradient with respect to the log-probs, [T]."""
    logprobs = problem.logprobs.clone().requires_grad_()
    used = normaliser or Normaliser.count(problem.batch)
    output = of.loss(logprobs, problem.batch, used, entropy=entropy, state=state or prepared(of, problem))
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output, gradient
