"""Batches for measuring sources of old log-probs: synthetic ones with a wished staleness, or those of a finished run.

Invariant: the batch of step s holds no version gap above s, so that the versions it asks for were made before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sqlalchemy

from megatron_async.bank import Bank
from megatron_async.bank.viewing import find, latest
from megatron_async.config import load
from megatron_async.engine.sequences import Sequence
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles
from megatron_async.trajectory import Trajectory

ACTION_SHARE = 0.5
"""Share of a synthetic trajectory's tokens that the policy wrote; the rest is prompt and observations."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A synthetic batch.

    gap: oldest version a token may have, in versions behind. spans: versions per trajectory, on average.
    """

    trajectories: int
    tokens: int
    gap: int
    spans: float
    vocabulary: int


def synthetic(recipe: Recipe, step: int) -> list[Sequence]:
    """The batch of a step: trajectories of uneven length, each sampled under one or several consecutive versions."""
    random = np.random.default_rng((7, step))
    return [_trajectory(random, recipe, min(recipe.gap, step)) for _ in range(recipe.trajectories)]


def _trajectory(random: np.random.Generator, recipe: Recipe, gap: int) -> Sequence:
    length = int(random.integers(recipe.tokens // 2, recipe.tokens + 1))
    prompt = length // 8
    spans = min(1 + gap, int(recipe.spans) + int(random.random() < recipe.spans % 1))
    newest = int(random.integers(0, gap - spans + 2))
    # Versions grow along a trajectory, so gaps fall; each stretch is at least one token long.
    cuts = np.sort(random.choice(np.arange(prompt + 1, length), spans - 1, replace=False))
    gaps = np.zeros(length, np.int64)
    for behind, start in enumerate([prompt, *cuts.tolist()]):
        gaps[start:] = newest + spans - 1 - behind
    mask = random.random(length) < ACTION_SHARE
    mask[:prompt], mask[-1] = False, True
    mask[[prompt, *cuts.tolist()]] = True
    return Sequence(
        random.integers(0, recipe.vocabulary, length).astype(np.int32),
        arrays=_arrays(
            mask, gaps, np.zeros(length, bool), float(random.normal()), -np.log(recipe.vocabulary)
        ),
    )


def recorded(run: Path) -> list[list[Sequence]]:
    """The batches that a finished run trained on, by step, each with the version gaps it had.

    Raises UserError when the run's bank holds none.
    """
    url = load(RunFiles(run).config).bank_url
    with Bank.open(url) as bank:
        versions = {step.step: step.version_before for step in bank.steps() if step.state == "committed"}
    engine = sqlalchemy.create_engine(url)
    members: dict[int, list[Trajectory]] = {}
    for row in reversed(latest(engine, sum(1 for _ in versions) * 100_000)):
        if row.step in versions:
            members.setdefault(row.step, []).append(find(engine, row.trajectory_id))
    engine.dispose()
    if not members:
        raise UserError(
            f"{run}: its bank holds no trained batch; give a run that made steps and kept its tokens"
        )
    return [
        [_of_trajectory(trajectory, versions[step] or 0, step - min(members)) for trajectory in members[step]]
        for step in sorted(members)
    ]


def _of_trajectory(trajectory: Trajectory, version: int, step: int) -> Sequence:
    mask = trajectory.loss_mask
    gaps = np.where(mask, np.clip(version - trajectory.versions, 0, step), 0).astype(np.int64)
    sampled = np.where(mask, trajectory.rollout_logprobs, 0.0)
    advantage = trajectory.required_reward() - 0.5
    arrays = _arrays(mask, gaps, trajectory.kv_mismatch, advantage, 0.0) | {"rollout_logprobs": sampled}
    return Sequence(trajectory.token_ids, trajectory.sampling.temperature, arrays)


def _arrays(
    mask: np.ndarray, gaps: np.ndarray, kv_mismatch: np.ndarray, advantage: float, rollout_logprob: float
) -> dict[str, np.ndarray]:
    length = len(mask)
    return {
        "action_mask": mask,
        "version_gap": np.where(mask, gaps, 0),
        "update_gap": np.where(mask, gaps, 0),
        "kv_mismatch": kv_mismatch,
        "advantages": np.full(length, advantage, np.float32),
        "rollout_logprobs": np.full(length, rollout_logprob, np.float32),
        "rewards": np.full(length, advantage, np.float32),
    }
