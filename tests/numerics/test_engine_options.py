"""Options that go to megatron-core as they are: what passes reaches it, what is refused says why."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_async.config import MegatronConfig
from megatron_async.config.schema import LayoutConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megatron_async.engine import checkpoint, options, platform
from megatron_async.engine.model import transformer_config
from megatron_async.engine.options import OptionError, merged
from megatron_async.engine.policy import Policy
from tests.engine_batches import OPTIMIZER, make_sequences, weighted_loss
from tests.engine_reference import make_model
from tests.numerics.test_engine_platform import make_hf

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = tmp_path_factory.mktemp("moe")
    make_model("moe").save_pretrained(path)
    return ModelConfig(path=str(path), dtype="float32")


def trainer(**given: dict[str, float | str | bool | None]) -> TrainerConfig:
    return TrainerConfig(micro_batch_tokens=48, megatron=MegatronConfig(**given))


def build(model: ModelConfig, **given: dict[str, float | str | bool | None]) -> Policy:
    return Policy.build(model, LayoutConfig(), trainer(**given), OPTIMIZER)


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("transformer", "recompute_granularty", "full", "no such option; did you mean 'recompute_granularity'"),
        ("transformer", "wholly_unknown_xyz", 1, "no such option"),
        ("transformer", "tensor_model_parallel_size", 2, "the engine sets it from layout"),
        ("transformer", "tp_comm_overlap", True, "packed micro-batches differ in length"),
        ("transformer", "moe_enable_routing_replay", True, "trainer.routing_replay"),
        ("transformer", "deallocate_pipeline_outputs", True, "depends on the backend"),
        ("ddp", "overlap_param_gather", True, "read whole weights right after every step"),
        ("ddp", "average_in_collective", True, "normalised over the global batch"),
        ("optimizer", "lr", 1.0, "the engine sets it from layout, model, trainer and optimizer"),
    ],
)
def test_what_cannot_be_set_says_why(kind: str, name: str, value: float | str | bool, message: str) -> None:
    own = {"tensor_model_parallel_size": 1, "lr": 1e-6, "average_in_collective": False}
    with pytest.raises(OptionError, match=f"trainer.megatron.{kind}.{name}: .*{message}"):
        merged(kind, own, {name: value})


@needs_cpu
@pytest.mark.parametrize(
    ("kind", "name", "value", "missing"),
    [
        ("transformer", "fp8", "hybrid", "Transformer Engine is not installed.*"),
        ("transformer", "moe_grouped_gemm", True, "Transformer Engine is not installed.*"),
        ("transformer", "apply_rope_fusion", True, "Transformer Engine is not installed.*"),
        ("transformer", "gradient_accumulation_fusion", True, "Transformer Engine .* or apex .* is not installed.*"),
        ("transformer", "persist_layer_norm", True, "apex with its extensions is not installed.*"),
        ("transformer", "masked_softmax_fusion", True, "there is no CUDA device"),
        ("optimizer", "optimizer_cpu_offload", True, "there is no CUDA device"),
    ],
)
def test_what_is_not_installed_is_named(kind: str, name: str, value: str | bool, missing: str) -> None:
    assert importlib.util.find_spec("transformer_engine") is None
    with pytest.raises(OptionError, match=f"trainer.megatron.{kind}.{name}: {missing}, which it needs"):
        merged(kind, {}, {name: value})


def test_a_missing_feature_may_be_switched_off_by_name() -> None:
    assert merged("transformer", {"moe_grouped_gemm": True}, {"moe_grouped_gemm": False}) == {
        "moe_grouped_gemm": False
    }


def test_every_listed_option_exists_in_this_megatron() -> None:
    """A rename upstream must not make a check silently useless."""
    known = {field for cls in options.CLASSES.values() for field in cls.__dataclass_fields__}
    assert set(options.NEEDS) | set(options.REFUSED) | options.OPTIONAL <= known
    assert {word for needs in options.NEEDS.values() for word in needs.split()} <= set(options.HOW)


def test_options_reach_megatron() -> None:
    given = {"recompute_granularity": "selective", "moe_router_topk_scaling_factor": None, "num_moe_experts": None}
    with pytest.raises(OptionError, match="num_moe_experts"):
        transformer_config(make_hf(), ModelConfig(path="x"), LayoutConfig(), trainer(transformer=given))
    given.pop("num_moe_experts")
    config = transformer_config(make_hf(), ModelConfig(path="x"), LayoutConfig(), trainer(transformer=given))
    assert config.recompute_granularity == "selective"


def test_megatrons_own_refusal_names_the_options() -> None:
    given = {"recompute_granularity": "everything"}
    with pytest.raises(OptionError, match=r"megatron-core refuses trainer.megatron.transformer \(recompute_gran"):
        transformer_config(make_hf(), ModelConfig(path="x"), LayoutConfig(), trainer(transformer=given))


def test_overlapped_reduction_gives_the_same_step(model: ModelConfig) -> None:
    """Several micro-batches and small buckets: only the last micro-batch may start reducing."""
    sequences = make_sequences()
    loss_fn = weighted_loss(sum(map(len, sequences)))
    weights = []
    for ddp in ({}, {"overlap_grad_reduce": True, "bucket_size": 1000}):
        policy = build(model, ddp=ddp)
        if ddp:
            assert len(policy.chunks[0].buffers[0].buckets) > 1
        for _ in range(2):
            assert policy.train_step(sequences, loss_fn).micro_batches > 1
        weights.append({name: tensor.clone() for name, tensor in policy.export() if tensor is not None})
    # The norm is summed by bucket, in another order; everything else is the same arithmetic.
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-5, atol=1e-7)


def test_states_that_a_checkpoint_cannot_hold_are_refused_before_training(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.build(model, LayoutConfig(), TrainerConfig(), OptimizerConfig())
    assert policy.optimizer is not None
    monkeypatch.setattr(policy.optimizer.megatron_config, "optimizer_cpu_offload", True)
    with pytest.raises(checkpoint.CheckpointError, match="checkpoint.every to 0.*optimizer_cpu_offload"):
        checkpoint.ShardedWriter().prepare(policy)


def test_fp8_streams_are_padded_for_its_products(model: ModelConfig) -> None:
    assert options.token_multiple({"fp8": "hybrid"}) == 16
    assert options.token_multiple({}) == options.token_multiple({"fp8": None}) == 1
    assert platform.setup().is_gpu or Policy.build(model, LayoutConfig(), TrainerConfig())._cut.stream_multiple == 1


@needs_cpu
def test_outputs_that_are_still_being_sent_are_not_freed() -> None:
    """Trap: with gloo and overlapped sends, freed outputs corrupt virtual pipelines (their parity is tested too)."""
    layout = LayoutConfig(world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    config = transformer_config(make_hf(), ModelConfig(path="x"), layout, TrainerConfig())
    assert config.overlap_p2p_comm
    assert not config.deallocate_pipeline_outputs
