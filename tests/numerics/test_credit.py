"""Credit on one rank with a real critic: what it learns, when, and which values the advantages come from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_async.bank.lineage import Lineage
from megatron_async.config import RunConfig, from_dict
from megatron_async.engine.critic import Values
from megatron_async.engine.sequences import Sequence
from megatron_async.training.batch import Batch, to_sequences
from megatron_async.training.credit import BaselineCredit, CriticCredit, build_credit, to_episodes
from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan
from tests.engine_batches import VOCAB
from tests.engine_reference import make_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("credit") / "model"
    make_model("moe").save_pretrained(path)
    return path


def make_trajectories(count: int, seed: int) -> list[Trajectory]:
    """Two turns each; the reward is told by the first token alone (even or odd)."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        first = int(random.integers(0, VOCAB))
        trajectory = Trajectory(f"t{seed}-{index}", f"g{seed}-{index}", f"p{index}", SamplingParams())
        trajectory.append_context([first, *random.integers(0, VOCAB, 3).tolist()])
        for turn in range(2):
            size = int(random.integers(1, 5))
            ids = random.integers(0, VOCAB, size).tolist()
            trajectory.append_action(ids, [-1.0] * size, [VersionSpan(0, 0, size)], finish_reason="stop")
            if turn == 0:
                trajectory.append_context(random.integers(0, VOCAB, 6).tolist())
        trajectory.finish(Status.OK, reward=float(first % 2), info={})
        made.append(trajectory)
    return made


def configuration(checkpoint: Path, **critic: object) -> RunConfig:
    return from_dict(
        {
            "name": "credit",
            "model": {"path": str(checkpoint), "dtype": "float32"},
            "batch": {"groups": 16, "group_size": 1},
            "trainer": {"micro_batch_tokens": 128},
            "objective": {"name": "dis"},
            "advantage": {"name": "gae", "drop_zero_variance_groups": False},
            "critic": {"lr": 3e-3, "warmup_steps": 2, **critic},
        }
    )


@contextlib.contextmanager
def no_stage(name: str, step: int) -> Iterator[None]:
    yield


def batch_of(credit: BaselineCredit, trajectories: list[Trajectory]) -> list[Sequence]:
    advantages, trained = credit.scalars(trajectories)
    return to_sequences(Batch(trajectories, advantages, trained, 0, Lineage([(0, None)])))


def build(checkpoint: Path, **critic: object) -> CriticCredit:
    credit = build_credit(configuration(checkpoint, **critic), no_stage)
    assert isinstance(credit, CriticCredit)
    return credit


def flat(sequences: list[Sequence], name: str = "advantages") -> np.ndarray:
    return np.concatenate([sequence.arrays[name] for sequence in sequences])


def test_a_critic_learns_what_the_first_token_tells(checkpoint: Path) -> None:
    credit, explained = build(checkpoint), []
    for step in range(40):
        trajectories = make_trajectories(16, step % 4)
        credit.assign(step, trajectories, batch_of(credit, trajectories))
        credit.learn(step)
        metrics = credit.take_metrics()
        explained.append(metrics["critic/explained_variance"])
        assert metrics["critic/skipped_updates"] == 0
        assert ("skipped" in metrics) == credit.holds_policy(step) == (step < 2)
    assert explained[0] == 0.0  # all values are 0
    assert np.mean(explained[-4:]) > 0.5


def test_a_new_critic_gives_the_reward_to_every_action_token_with_lambda_one(checkpoint: Path) -> None:
    credit = build_credit(configuration(checkpoint), no_stage)
    trajectories = make_trajectories(6, 1)
    sequences = credit.assign(9, trajectories, batch_of(credit, trajectories))
    for sequence, trajectory in zip(sequences, trajectories, strict=True):
        actions = int(trajectory.loss_mask.sum())
        lam = 1 - 1 / (1.5 * actions)
        expected = trajectory.required_reward() * lam ** np.arange(actions - 1, -1, -1)
        np.testing.assert_allclose(sequence.arrays["advantages"][trajectory.loss_mask], expected, rtol=1e-6)
        assert not sequence.arrays["advantages"][~trajectory.loss_mask].any()
    assert sequences[0].arrays.keys() == batch_of(credit, trajectories)[0].arrays.keys()


def test_order_decides_whether_a_baseline_knows_its_own_reward(checkpoint: Path) -> None:
    trajectories = make_trajectories(16, 0)
    first, second = build(checkpoint, order="policy_first"), build(checkpoint, order="critic_first")
    mask = np.concatenate([trajectory.loss_mask for trajectory in trajectories])
    results = []
    for credit in (first, second):
        for step in (5, 6):  # the head's first update alone gives the body its gradient
            sequences = credit.assign(step, trajectories, batch_of(credit, trajectories))
            credit.learn(step)
        results.append(flat(sequences)[mask])
    # The updated critic is closer to the rewards: what is left of them is smaller.
    assert np.square(results[1]).mean() < np.square(results[0]).mean()
    # The same number of updates was made on the same targets: the critics are equal.
    values = [np.concatenate(credit.critic.values(sequences).before) for credit in (first, second)]
    np.testing.assert_array_equal(*values)


def test_updates_are_made_k_times(checkpoint: Path) -> None:
    trajectories = make_trajectories(8, 3)
    for updates in (1, 3):
        credit = build(checkpoint, updates=updates)
        credit.assign(5, trajectories, batch_of(credit, trajectories))
        assert credit.state_dict() == {"optimizer_steps": 0}
        credit.learn(5)
        assert credit.state_dict() == {"optimizer_steps": updates}
        credit.learn(6)  # nothing is pending
        assert credit.state_dict() == {"optimizer_steps": updates}


def test_episodes_carry_reward_turns_and_truncation() -> None:
    (done,) = make_trajectories(1, 5)
    again = Trajectory("cut", "g", "p", SamplingParams())
    again.append_context([1, 2])
    again.append_action([3, 4], [-1.0, -1.0], [VersionSpan(0, 0, 2)], finish_reason="length")
    again.append_context([5])
    again.finish(Status.TRUNCATED, reward=0.5, info={})
    trajectories = [done, again]
    values = Values(
        [np.zeros(len(t.token_ids), np.float32) for t in trajectories], np.array([1.0, 2.0], np.float32)
    )
    episodes = to_episodes(trajectories, values)
    start = len(done.token_ids)
    assert episodes.rewards[start:].tolist() == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert episodes.turn_ids[start:].tolist() == [-1, -1, 0, 0, -1]
    assert episodes.truncated[start - 1 :].tolist() == [False] + [True] * 5
    assert episodes.after[start - 1 : start + 1].tolist() == [1.0, 2.0]
    assert torch.equal(episodes.sequence_ids[start - 1 : start + 1], torch.tensor([0, 1]))


def test_without_a_critic_a_trajectory_has_one_advantage(checkpoint: Path) -> None:
    plain = from_dict(
        {
            "name": "credit",
            "model": {"path": str(checkpoint)},
            "batch": {"groups": 16, "group_size": 1},
            "advantage": {"name": "batch_mean", "normalise_std": False, "drop_zero_variance_groups": False},
        }
    )
    credit = build_credit(plain, no_stage)
    assert not isinstance(credit, CriticCredit)
    trajectories = make_trajectories(4, 2)
    rewards = [trajectory.required_reward() for trajectory in trajectories]
    advantages, trained = credit.scalars(trajectories)
    assert advantages == pytest.approx([reward - sum(rewards) / 4 for reward in rewards])
    assert trained == [0, 1, 2, 3]
    assert not credit.holds_policy(0)
