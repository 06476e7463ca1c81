"""The reference policy of a KL penalty: version 0 of the weights, scored beside the anchor, on a real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_async.config.schema import LayoutConfig, ModelConfig, ObjectiveConfig, TrainerConfig
from megatron_async.engine.policy import Policy
from megatron_async.objectives import build_objective
from megatron_async.old_logits.reference import WithReference, reference_weights
from megatron_async.old_logits.source import StartSource
from tests.engine_reference import make_model
from tests.old_logits_batches import OPTIMIZER, policy_gradient, versioned_sequences


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "model"
    make_model("moe").save_pretrained(path)
    return path


def build(model: Path, dtype: str, distributed: bool) -> Policy:
    trainer = TrainerConfig(use_distributed_optimizer=distributed, micro_batch_tokens=64)
    config = ModelConfig(path=str(model), dtype=dtype)  # type: ignore[arg-type]
    return Policy.build(config, LayoutConfig(), trainer, OPTIMIZER)


@pytest.mark.parametrize(("dtype", "distributed"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("resumed", [False, True])
def test_the_reference_stays_what_it_was_and_the_policy_comes_back(
    model: Path, dtype: str, distributed: bool, resumed: bool
) -> None:
    policy = build(model, dtype, distributed)
    batch = versioned_sequences(range(1), current=0)
    expected = policy.logprobs(batch)
    reference = None if resumed else reference_weights(policy, is_reference=True)
    for _ in range(2):
        assert policy.train_step(batch, policy_gradient(batch)).skipped is None
    if reference is None:
        reference = reference_weights(policy, is_reference=False)
    before = [parameter.detach().clone() for _, parameter in policy.named_parameters()]
    source = WithReference(policy, StartSource(policy, separate_pass=True), reference)
    for _ in range(2):
        found = source.score(batch, [f"t{i}" for i in range(len(batch))])
        assert found.reference is not None and found.values is not None
        assert all(np.array_equal(a, b) for a, b in zip(found.reference, expected, strict=True))
        assert max(np.abs(a - b).max() for a, b in zip(found.values, expected, strict=True)) > 1e-3
    after = [parameter.detach() for _, parameter in policy.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert {"forward", "reference_forward", "reference_switch"} <= found.seconds.keys()


def test_an_objective_with_a_penalty_asks_for_it() -> None:
    assert "reference" in build_objective(ObjectiveConfig(kl_coefficient=1e-3)).needs
    assert "reference" not in build_objective(ObjectiveConfig()).needs
