"""Routing replay on one rank: which records are usable, what is asserted, gradients against finite differences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_async.config.schema import LayoutConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megatron_async.engine.policy import Policy
from megatron_async.engine.routing_replay import has_distinct_experts, record_dtype
from megatron_async.engine.sequences import BatchIndex, Cut, Sequence, build_micro_batch
from tests.engine_batches import weighted_loss
from tests.engine_reference import make_model
from tests.replay_batches import MOE_LAYERS, TOPK, recorded_sequences, replayed


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    path = tmp_path_factory.mktemp("moe")
    make_model("moe").save_pretrained(path)
    trainer = TrainerConfig(use_distributed_optimizer=False, micro_batch_tokens=64, routing_replay="rollout")
    model = ModelConfig(path=str(path), dtype="float32")
    return Policy.build(model, LayoutConfig(), trainer, OptimizerConfig(lr=0.0, clip_grad=0.0))


@pytest.mark.parametrize(
    ("rows", "usable"),
    [
        ([[0, 1], [3, 2]], True),
        ([[0, 1], [2, 2]], False),
        ([[0, 4], [1, 2]], False),
        ([[0, -1], [1, 2]], False),
    ],
)
def test_experts_must_be_distinct_and_exist(rows: list[list[int]], usable: bool) -> None:
    """Trap: a row that repeats an expert is accepted by Megatron's replay and loses weight."""
    assert has_distinct_experts(np.array(rows)[:, None], 4) is usable
    assert has_distinct_experts(np.array(rows, np.int8)[:, None], 4) is usable


@pytest.mark.parametrize(("rows", "replays"), [(-2, False), (-1, True), (0, True), (1, False)])
def test_the_record_has_a_row_per_token_but_the_last(policy: Policy, rows: int, replays: bool) -> None:
    """A doubled or shifted record of a partial response is longer than its sequence: not replayed, and counted."""
    sequence = recorded_sequences()[2]
    assert sequence.routed_experts is not None
    record = np.concatenate([sequence.routed_experts, sequence.routed_experts[:5]])[: len(sequence) + rows]
    assert policy.routing is not None
    policy.logprobs([replace(sequence, routed_experts=record)])
    assert policy.routing.take_metrics()["routing_replay/fallback"] == (0.0 if replays else 1.0)


def test_a_later_pass_replays_its_own_records(policy: Policy) -> None:
    """Field bug 40: megatron-core's replay appends in forward-only passes, and training then replays what is stale."""
    sequences = [s for s in recorded_sequences() if replayed(s)]
    records = [s.routed_experts for s in sequences if s.routed_experts is not None]
    others = [replace(s, routed_experts=record ^ 1) for s, record in zip(sequences, records, strict=True)]
    loss_fn = weighted_loss(sum(map(len, sequences)))
    alone = policy.train_step(others, loss_fn)
    for _ in range(2):
        policy.logprobs(sequences)
    after = policy.train_step(others, loss_fn)
    scored = policy.logprobs(others)
    for values in (after.logprobs, scored):
        assert all(np.array_equal(a, b) for a, b in zip(values, alone.logprobs, strict=True))
    different = policy.logprobs(sequences)
    assert max(np.abs(a - b).max() for a, b in zip(different, scored, strict=True)) >= 0.1


def test_passes_cannot_be_nested(policy: Policy) -> None:
    assert policy.routing is not None
    with policy.routing.replaying([]):
        with pytest.raises(AssertionError, match="nested"):
            policy.logprobs(recorded_sequences())
    assert all(layer.mlp.router.router_replay is None for layer, _ in policy.routing._layers)


def test_a_failing_pass_leaves_no_replay(policy: Policy) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        policy.train_step(recorded_sequences(), broken)  # type: ignore[arg-type]
    assert policy.routing is not None
    for layer, _ in policy.routing._layers:
        assert layer.mlp.router.router_replay is None
        assert not layer._forward_pre_hooks
        assert not layer._forward_hooks


def test_records_lie_beside_their_tokens_in_a_packed_stream() -> None:
    sequences = recorded_sequences()
    batch = BatchIndex(sequences, routing=True)
    routing = build_micro_batch(batch, (0, 1, 2), Cut(1, 1, 0, torch.device("cpu"))).routing
    assert routing is not None
    lengths = [len(sequence) for sequence in sequences[:3]]
    assert routing.experts.shape == (sum(lengths), MOE_LAYERS, TOPK)
    known = [n < lengths[i] - 1 and i != 1 for i in range(3) for n in range(lengths[i])]
    assert routing.known.tolist() == known
    record = sequences[2].routed_experts
    assert record is not None
    assert torch.equal(routing.experts[sum(lengths[:2]) : -1], torch.from_numpy(record).to(torch.int16))


def test_router_gradients_equal_finite_differences(policy: Policy) -> None:
    """Field bug 42. With the choice of experts fixed the loss is smooth in the routers' weights."""
    sequences = [sequence for sequence in recorded_sequences() if replayed(sequence)]
    # The last token routes natively: leave it out of the loss, which nothing else reads its experts for.
    loss_fn = weighted_loss(sum(map(len, sequences)))
    policy.train_step(sequences, loss_fn)
    assert policy.routing is not None
    layer, _ = policy.routing._layers[-1]
    weight = layer.mlp.router.weight
    gradient = weight.main_grad.clone()
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))

    def loss_at(step: float) -> float:
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(step * direction)
        loss = policy.train_step(sequences, loss_fn).loss
        with torch.no_grad():
            weight.copy_(kept)
        return loss

    slope = (loss_at(1e-2) - loss_at(-1e-2)) / 2e-2
    # Central differences in fp32: curvature and rounding of about 1e-5 each.
    assert slope == pytest.approx(float((gradient * direction).sum()), abs=2e-4, rel=1e-2)
    assert abs(slope) >= 1e-3


def test_scoring_a_cut_sequence_takes_the_same_experts(policy: Policy) -> None:
    """Old log-probs are computed on sequences cut after the last token of a version."""
    sequence = recorded_sequences()[2]
    (whole,) = policy.logprobs([sequence])
    record = sequence.routed_experts
    assert record is not None
    cut = Sequence(sequence.token_ids[:12], sequence.temperature, routed_experts=record[:12])
    (part,) = policy.logprobs([cut])
    # The same products in matrices of another height.
    np.testing.assert_allclose(part, whole[:12], atol=2e-6)


def test_own_routing_is_recorded_only_where_it_is_asked_for(policy: Policy) -> None:
    sequences = recorded_sequences()
    assert policy.trainer.routing_replay == "rollout"
    assert policy.with_own_routing(sequences) is sequences


@pytest.mark.parametrize(("experts", "dtype"), [(128, np.uint8), (256, np.uint8), (512, np.int16)])
def test_records_are_as_narrow_as_the_experts_allow(experts: int, dtype: type) -> None:
    assert np.iinfo(record_dtype(experts)).max >= experts - 1
    assert record_dtype(experts) is dtype
