"""Value pre-training: a critic learns from the trajectories of recorded runs, before it judges anything.

Runs under torchrun (`megatron-async pretrain-critic`). A critic that starts at 0 gives advantages that are rewards, and
in the first steps teaches the policy that everything is good; one that knows the warm-started policy does not. Every
rank reads the same banks and draws the same batches; the trajectories of a tenth of the prompts are held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_async.advantages.targets import gae_targets
from megatron_async.bank import viewing
from megatron_async.bank.dialects import make_engine
from megatron_async.config import load
from megatron_async.config.schema import RunConfig
from megatron_async.engine import platform
from megatron_async.engine.critic import Critic
from megatron_async.engine.sequences import Sequence
from megatron_async.errors import UserError
from megatron_async.observe import MetricsWriter, RunFiles
from megatron_async.training.credit import (
    critic_metrics,
    estimate_metrics,
    learning_sequences,
    to_episodes,
)
from megatron_async.training.critics import build_critic, update_critic
from megatron_async.trajectory import Trajectory

MOST_TRAJECTORIES = 100_000
HELD_OUT_SHARE = 10
"""One prompt in so many is held out."""


def main(config: RunConfig) -> int:
    """`steps` batches of value updates, then the critic as a checkpoint in the run's folder; returns the exit code."""
    trajectories = recorded_trajectories(config)
    held_out, learned = split(trajectories)
    if not learned:
        raise UserError(
            f"critic.pretrain_runs: {len(trajectories)} recorded trajectories are too few to learn from"
        )
    critic = build_critic(config)
    try:
        batches = _batches(learned, config.batch.trajectories, config.seed)
        metrics = (
            MetricsWriter(config.run_path, tensorboard=config.observe.tensorboard)
            if dist.get_rank() == 0
            else None
        )
        for step in range(config.steps):
            row = _learn(critic, config, next(batches))
            if step == config.steps - 1:
                row |= {f"heldout/{name}": value for name, value in _judge(critic, config, held_out).items()}
            if metrics is not None:
                metrics.log(step, row)
        if metrics is not None:
            metrics.close()
        critic.save_hf(RunFiles(config.run_path).critic)
    finally:
        platform.shutdown()
    return 0


def recorded_trajectories(config: RunConfig) -> list[Trajectory]:
    """Trajectories with a reward from the banks of `critic.pretrain_runs`, oldest first.

    Raises UserError when no run is named, a folder is no run, or nothing is recorded.
    """
    if not config.critic.pretrain_runs:
        raise UserError(
            "critic.pretrain_runs is empty; name the folders of runs whose trajectories are to be learned"
        )
    found: list[Trajectory] = []
    for run in config.critic.pretrain_runs:
        engine = make_engine(load(Path(run) / "config.yaml").bank_url)
        rows = viewing.finished(engine, MOST_TRAJECTORIES)
        engine.dispose()
        recorded = [row.trajectory for row in reversed(rows)]
        found += [t for t in recorded if len(t.token_ids) <= config.rollout.max_tokens and t.loss_mask.any()]
    if not found:
        raise UserError(
            f"critic.pretrain_runs: no finished trajectory of at most rollout.max_tokens = {config.rollout.max_tokens} "
            f"tokens in {', '.join(config.critic.pretrain_runs)}"
        )
    return found


def split(trajectories: list[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """Held out and learned, without a prompt in common: the other members of a group tell what a prompt is worth."""
    number: dict[str, int] = {}
    held_out: list[Trajectory] = []
    learned: list[Trajectory] = []
    for trajectory in trajectories:
        place = number.setdefault(trajectory.prompt_id, len(number))
        (learned if place % HELD_OUT_SHARE else held_out).append(trajectory)
    return held_out, learned


def _batches(trajectories: list[Trajectory], size: int, seed: int) -> Iterator[list[Trajectory]]:
    """Endless shuffled batches of `size`, or of all there are."""
    generator = np.random.default_rng(seed)
    size = min(size, len(trajectories))
    while True:
        order = generator.permutation(len(trajectories))
        for start in range(0, len(order) - size + 1, size):
            yield [trajectories[i] for i in order[start : start + size]]


def _sequences(trajectories: list[Trajectory]) -> list[Sequence]:
    return [Sequence(t.token_ids, 1.0, {"action_mask": t.loss_mask}) for t in trajectories]


def _learn(critic: Critic, config: RunConfig, trajectories: list[Trajectory]) -> dict[str, float]:
    sequences = _sequences(trajectories)
    episodes = to_episodes(trajectories, critic.values(sequences))
    targets = gae_targets(config.advantage, episodes)
    pending = learning_sequences(sequences, targets)
    results = [update_critic(critic, pending) for _ in range(config.critic.updates)]
    return estimate_metrics(episodes, targets) | critic_metrics(results, pending)


def _judge(critic: Critic, config: RunConfig, trajectories: list[Trajectory]) -> dict[str, float]:
    episodes = to_episodes(trajectories, critic.values(_sequences(trajectories)))
    return estimate_metrics(episodes, gae_targets(config.advantage, episodes))
