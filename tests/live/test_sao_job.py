"""SAO end to end: single rollouts, a critic beside the policy, warm-up, then its weights as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_async.bank import Bank
from megatron_async.observe import read_metrics
from tests.live.test_main_job import start, write_config

pytestmark = pytest.mark.slow
STEPS, WARMUP = 4, 1


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of SAO that was launched and ended by itself."""
    folder = tmp_path_factory.mktemp("sao")
    config = write_config(
        folder,
        checkpoint,
        steps=STEPS,
        batch={"groups": 12, "group_size": 1},
        objective={"name": "dis", "clip_low": 0.8, "clip_high": 5.0},
        advantage={"name": "gae", "drop_zero_variance_groups": False},
        critic={"lr": 3e-3, "warmup_steps": WARMUP, "updates": 2, "order": "critic_first"},
    )
    job = start(config)
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output
    return folder / "runs" / "job"


def test_the_warm_up_trains_the_critic_alone(finished: Path) -> None:
    rows = read_metrics(finished)
    assert [row["version"] for row in rows] == [0, 1, 2, 3]
    assert "critic warm-up: step 1 of 1" in rows[0]["skipped"]
    assert "objective/active" not in rows[0]
    assert all(row["critic/skipped_updates"] == 0 for row in rows)


def test_values_start_at_zero_and_learn_the_reward(finished: Path) -> None:
    rows = read_metrics(finished)
    assert rows[0]["critic/value_mean"] == 0.0
    assert rows[0]["critic/return_mean"] == pytest.approx(rows[0]["reward/mean"], abs=0.25)  # weighs tokens, not turns
    assert rows[-1]["critic/value_mean"] > 0.05
    # Two updates on one batch: the second forward sees what the first one learned.
    assert rows[0]["critic/squared_error_last"] < rows[0]["critic/squared_error_first"]


def test_every_trajectory_was_trained_once_and_alone_in_its_group(finished: Path) -> None:
    with Bank.open(f"sqlite:///{finished / 'bank.sqlite'}") as bank:
        assert bank.counts()["trained"] == 12 * STEPS
    assert all(row["batch/trained"] == 12 for row in read_metrics(finished))


def test_the_critic_is_saved_with_the_attention_it_started_from(finished: Path, checkpoint: Path) -> None:
    critic, start = load_file(finished / "critic" / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    shared = critic.keys() & start.keys()
    same = {name for name in shared if torch.equal(critic[name], start[name])}
    assert same == {name for name in shared if "self_attn" in name}
    assert critic["score.weight"].abs().max() > 0
