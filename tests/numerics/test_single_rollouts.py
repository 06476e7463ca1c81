"""Single rollouts with every objective: one trajectory a prompt, several versions in a batch, advantages of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_async.config import load
from megatron_async.config.methods import METHODS
from megatron_async.config.objective_checks import advantage_problems, objective_problems
from megatron_async.objectives import Normaliser, build_objective
from megatron_async.training.loss import token_batch

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (5, 9, 7, 12)
ON_POLICY = {"reinforce": ["rollout.max_staleness=0"]}
"""Plain REINFORCE corrects nothing, and is refused where tokens may be old."""


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_of_single_rollouts_of_several_versions_trains(name: str) -> None:
    changes = ["objective=null", f"objective.name={name}", *ON_POLICY.get(name, [])]
    config = load(ROOT / "recipes/configs/sao_desk.yaml", changes)
    assert not objective_problems(config) + advantage_problems(config)
    assert config.batch.group_size == 1 and config.advantage.name == "gae"
    objective = build_objective(config.objective)
    dice = np.random.default_rng(0)
    tokens = sum(LENGTHS)
    sequence = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    rollout = dice.normal(-1.0, 0.3, tokens).astype(np.float32)
    arrays = {
        "action_mask": np.concatenate([np.arange(length) >= 2 for length in LENGTHS]),
        "rollout_logprobs": rollout,
        "anchor_logprobs": rollout + dice.normal(0, 0.01, tokens).astype(np.float32),
        "advantages": dice.normal(0, 1, tokens).astype(np.float32),
        "rewards": np.repeat(dice.integers(0, 2, len(LENGTHS)), LENGTHS).astype(np.float32),
        "update_gap": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
    }
    packed = {key: torch.from_numpy(array) for key, array in arrays.items()}
    logprobs = torch.from_numpy(rollout + dice.normal(0, 0.01, tokens).astype(np.float32)).requires_grad_()
    batch = token_batch(packed, torch.from_numpy(sequence), logprobs)
    actions = int(arrays["action_mask"].sum())
    state = objective.prepare(batch, logprobs.detach(), gather=lambda values: values)
    objective.loss(logprobs, batch, Normaliser(actions, len(LENGTHS)), state=state).loss.backward()
    assert logprobs.grad is not None
    gradient = logprobs.grad.numpy()
    assert np.isfinite(gradient).all() and not gradient[~arrays["action_mask"]].any()
    for number in range(len(LENGTHS)):
        assert gradient[sequence == number].any(), f"trajectory {number} has no influence"
