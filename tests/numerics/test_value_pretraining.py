"""Value pre-training on what a run recorded: learned, held out, saved, and taken up by a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async import value_pretraining
from megatron_async.bank import Bank
from megatron_async.config import dump
from megatron_async.errors import UserError
from megatron_async.observe import read_metrics
from megatron_async.training.credit import build_credit
from megatron_async.trajectory import SamplingParams, Trajectory
from tests.numerics.test_credit import batch_of, checkpoint, configuration, make_trajectories, no_stage

__all__ = ["checkpoint"]


@pytest.fixture
def recorded(checkpoint: Path, tmp_path: Path) -> Path:
    """The folder of a run whose bank holds 64 finished trajectories."""
    config = replace(configuration(checkpoint), run_dir=str(tmp_path), name="recorded")
    config.run_path.mkdir()
    (config.run_path / "config.yaml").write_text(dump(config))
    with Bank.open(config.bank_url) as bank:
        for trajectory in make_trajectories(64, 0):
            ids = (trajectory.trajectory_id, trajectory.group_id, trajectory.prompt_id)
            bank.start_trajectory(Trajectory(*ids, SamplingParams()))
            bank.finish_trajectory(trajectory)
    return config.run_path


def test_a_pretrained_critic_knows_the_recorded_rewards(
    checkpoint: Path, recorded: Path, tmp_path: Path
) -> None:
    learning = configuration(checkpoint, pretrain_runs=[str(recorded)], lr=1e-2)
    config = replace(learning, run_dir=str(tmp_path), name="values", steps=40)
    assert value_pretraining.main(config) == 0
    rows = read_metrics(config.run_path)
    assert len(rows) == 40
    assert rows[0]["critic/explained_variance"] == 0.0
    assert rows[-1]["critic/explained_variance"] > 0.5
    assert "heldout/critic/explained_variance" in rows[-1]
    credit = build_credit(configuration(checkpoint, path=str(config.run_path / "critic")), no_stage)
    trajectories = make_trajectories(64, 0)
    credit.assign(0, trajectories, batch_of(credit, trajectories))
    assert credit.take_metrics()["critic/explained_variance"] > 0.5


def test_what_cannot_be_learned_from_is_said(checkpoint: Path, recorded: Path) -> None:
    with pytest.raises(UserError, match="pretrain_runs is empty"):
        value_pretraining.main(configuration(checkpoint))
    config = configuration(checkpoint, pretrain_runs=[str(recorded)])
    short = replace(config, rollout=replace(config.rollout, max_tokens=5))
    with pytest.raises(UserError, match="at most rollout.max_tokens = 5"):
        value_pretraining.main(short)


def test_no_prompt_is_both_learned_and_held_out() -> None:
    trajectories = make_trajectories(64, 0)
    for number, trajectory in enumerate(trajectories):
        trajectory.prompt_id = f"prompt {number // 4}"  # groups of four
    held_out, learned = value_pretraining.split(trajectories)
    assert {t.prompt_id for t in held_out}.isdisjoint(t.prompt_id for t in learned)
    assert (len(held_out), len(learned)) == (8, 56)  # two of sixteen prompts
