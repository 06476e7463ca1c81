"""The policy on one rank: parity with transformers, invariance to cuts, careful steps, weights in and out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_async import training_record
from megatron_async.config.schema import LayoutConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megatron_async.engine.hf_config import HFConfig, UnsupportedModelError
from megatron_async.engine.hf_reader import CheckpointMissing
from megatron_async.engine.hf_weights import WeightMismatch
from megatron_async.engine.policy import Policy, TokenError
from megatron_async.engine.sequences import Packed, Sequence
from tests.distributed.engine_ranks import inspect_gradients, inspect_steps, whole_gradients
from tests.engine_batches import OPTIMIZER, make_sequences, weighted_loss
from tests.engine_reference import make_model, reference_forward, write_reference

ONE = LayoutConfig()


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engine")
    for kind in ("dense", "moe"):
        (directory / kind).mkdir()
        write_reference(directory / kind, kind)
    return directory


def build(
    directory: Path,
    *,
    budget: int = 64,
    optimizer: OptimizerConfig | None = OPTIMIZER,
    dtype: str = "float32",
    distributed: bool = False,
    recompute: bool = False,
) -> Policy:
    trainer = TrainerConfig(
        micro_batch_tokens=budget, use_distributed_optimizer=distributed, recompute=recompute
    )
    model = ModelConfig(path=str(directory), dtype=dtype)  # type: ignore[arg-type]
    return Policy.build(model, ONE, trainer, optimizer)


@pytest.fixture
def moe(references: Path) -> Policy:
    return build(references / "moe" / "model")


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_parity_with_transformers(references: Path, kind: str) -> None:
    found = inspect_gradients(references / kind, ONE)
    assert found["token_error"] <= 2e-5
    assert found["train_logprob_error"] == 0.0
    assert found["gradient_error"] <= 1e-5, found["gradient_tensor"]
    assert found["norm_error"] <= 1e-5
    # The loss is a sum of about a hundred fp32 terms of size 1.
    assert found["loss_error"] <= 1e-5
    assert found["export_differs"] == []
    assert found["exported"] == found["gradients_compared"] == {"dense": 46, "moe": 77}[kind]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_steps_equal_torch_adamw(references: Path, kind: str) -> None:
    found = inspect_steps(references / kind, ONE)
    # Three fp32 Adam steps; rounding differs, nothing else.
    assert found["step_error"] <= 1e-5, found["step_tensor"]
    assert found["step_norm_error"] <= 1e-5


def gradients_of(policy: Policy, sequences: list[Sequence]) -> tuple[float, dict[str, torch.Tensor]]:
    result = policy.train_step(sequences, weighted_loss(sum(map(len, sequences))))
    return result.loss, whole_gradients(policy)


def test_cut_and_order_change_neither_loss_nor_gradient(references: Path) -> None:
    frozen = replace(OPTIMIZER, lr=0.0, clip_grad=0.0)
    sequences = make_sequences()
    loss, whole = gradients_of(build(references / "moe" / "model", budget=500, optimizer=frozen), sequences)
    for budget, order in ((500, sequences[::-1]), (30, sequences), (47, sequences[3:] + sequences[:3])):
        other, cut = gradients_of(build(references / "moe" / "model", budget=budget, optimizer=frozen), order)
        assert abs(other - loss) <= 1e-6
        for name, gradient in whole.items():
            # fp32 sums in another order: a few ulps of the largest element.
            assert (cut[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_recomputed_activations_give_the_same_gradient(references: Path) -> None:
    frozen = replace(OPTIMIZER, lr=0.0, clip_grad=0.0)
    sequences = make_sequences()
    found = [
        gradients_of(build(references / "moe" / "model", optimizer=frozen, recompute=recompute), sequences)
        for recompute in (False, True)
    ]
    assert found[0][0] == found[1][0]
    for name, gradient in found[0][1].items():
        # The same products in the same order: equal, but for the last bit of a reduction.
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-6, atol=1e-8)


def test_token_mean_is_the_global_one_whatever_the_split(references: Path) -> None:
    """Field bug 12: sequences of 1 and 4 tokens with per-token losses 1 and 3 give 2.6, in one micro-batch or in two.

    Trap: the schedule divides the loss in place by the number of micro-batches; what is reported is a copy.
    """
    sequences = [
        Sequence(np.zeros(n, np.int32), arrays={"value": np.full(n, value, np.float32)})
        for n, value in ((1, 1.0), (4, 3.0))
    ]

    def loss_fn(packed: Packed, logprobs: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, dict]:
        return packed.arrays["value"].sum() / 5 + 0.0 * logprobs.sum(), {}

    losses = {
        budget: build(references / "dense" / "model", budget=budget).train_step(sequences, loss_fn)
        for budget in (4, 5)
    }
    assert losses[4].micro_batches == 2 and losses[5].micro_batches == 1
    assert losses[4].loss == pytest.approx(2.6, abs=1e-6)
    assert losses[5].loss == pytest.approx(2.6, abs=1e-6)


def test_temperature_scales_the_logits(moe: Policy) -> None:
    model = make_model("moe")
    ids = make_sequences()[2].token_ids
    found = moe.logprobs([Sequence(ids, temperature) for temperature in (0.5, 1.0, 2.0)])
    for temperature, logprobs in zip((0.5, 1.0, 2.0), found, strict=True):
        expected, _ = reference_forward(model, Sequence(ids, temperature))
        # The parity bound, over the temperature that divides the logits.
        assert np.abs(logprobs - expected.detach().numpy()).max() <= 2e-5 / temperature
    assert np.abs(found[0] - found[2]).max() > 0.1


def test_neighbours_in_a_pack_are_invisible(moe: Policy) -> None:
    sequences = make_sequences()
    together = moe.logprobs(sequences)
    for i, sequence in enumerate(sequences):
        # Other shapes of the same products: rounding only.
        np.testing.assert_allclose(moe.logprobs([sequence])[0], together[i], rtol=0, atol=5e-6)


def test_bf16_with_fp32_masters_moves_below_bf16_resolution(references: Path) -> None:
    policy = build(
        references / "moe" / "model",
        dtype="bfloat16",
        optimizer=OptimizerConfig(lr=1e-5),
        distributed=True,
    )
    before = {name: tensor.clone() for name, tensor in policy.export() if tensor is not None}
    sequences = make_sequences()
    for _ in range(4):
        result = policy.train_step(sequences, weighted_loss(103))
        assert result.skipped is None
    after = {name: tensor for name, tensor in policy.export() if tensor is not None}
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    moved = sum((after[name] != before[name]).sum().item() for name in before)
    # Four steps of about 1e-5 on weights near 0.1 (bf16 spacing 5e-4): some bits flip, most must not.
    assert 0 < moved < 0.2 * sum(tensor.numel() for tensor in before.values())


def snapshot_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export() if tensor is not None}


def check_unchanged(policy: Policy, before: dict[str, torch.Tensor]) -> None:
    for name, tensor in policy.export():
        assert tensor is not None and torch.equal(tensor, before[name]), name


def one_real_step(policy: Policy) -> None:
    """Give Adam momentum, so that a step without data would move the weights."""
    assert policy.train_step(make_sequences(), weighted_loss(103)).skipped is None


def test_batch_without_active_tokens_makes_no_step_and_says_so(moe: Policy) -> None:
    """Field bug 14."""
    one_real_step(moe)
    before = snapshot_of(moe)
    sequences = [
        Sequence(s.token_ids, s.temperature, {**s.arrays, "action_mask": np.zeros(len(s), bool)})
        for s in make_sequences()
    ]

    def divides_by_active(
        packed: Packed, logprobs: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, dict]:
        return logprobs.sum() / packed.arrays["action_mask"].sum(), {}

    result = moe.train_step(sequences, divides_by_active)
    assert result.skipped is not None and "action_mask is all false" in result.skipped
    assert result.loss == 0.0 and result.grad_norm == 0.0
    assert np.isfinite(np.concatenate(result.logprobs)).all()
    check_unchanged(moe, before)


def test_zero_gradient_makes_no_step(moe: Policy) -> None:
    one_real_step(moe)
    before = snapshot_of(moe)
    result = moe.train_step(make_sequences(), lambda packed, logprobs, _: (0.0 * logprobs.sum(), {}))
    assert result.skipped is not None and "exactly zero" in result.skipped
    check_unchanged(moe, before)


@pytest.mark.parametrize("distributed", [False, True])
def test_non_finite_gradient_is_skipped_reported_and_forgotten(references: Path, distributed: bool) -> None:
    policy = build(references / "moe" / "model", distributed=distributed)
    one_real_step(policy)
    before = snapshot_of(policy)
    result = policy.train_step(make_sequences(), lambda packed, logprobs, _: (logprobs.sum() * torch.nan, {}))
    assert result.skipped is not None and "nan" in result.skipped
    check_unchanged(policy, before)
    one_real_step(policy)


def test_schedule_counts_steps_that_were_made(references: Path) -> None:
    schedule = OptimizerConfig(lr=1.0, lr_warmup_steps=4, lr_decay="linear", lr_decay_steps=8, min_lr=0.0)
    policy = build(references / "moe" / "model", optimizer=replace(schedule, lr=1e-3))
    rates = []
    for step in range(9):
        if step == 2:
            policy.train_step(make_sequences(), lambda packed, logprobs, _: (0.0 * logprobs.sum(), {}))
        rates.append(policy.train_step(make_sequences(), weighted_loss(103)).lr * 1e3)
    # Warm-up to the peak at step 4, then down to 0 at step 8.
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_loaded_optimizer_state_counts_each_parameter_once(references: Path) -> None:
    """Trap: Megatron's loading leaves one step tensor that all parameters share: it would count for each of them."""
    policy = build(references / "moe" / "model", distributed=True)
    one_real_step(policy)
    assert policy.optimizer is not None
    inner = policy.optimizer.megatron.chained_optimizers[0]
    shared = torch.tensor(5.0)
    for state in inner.optimizer.state.values():
        state["step"] = shared
    for parameter in inner.model_param_group_index_map:
        tensors = {
            "exp_avg": torch.zeros(()),
            "exp_avg_sq": torch.ones(()),
        }
        inner._set_main_param_and_optimizer_states(parameter, tensors)
    one_real_step(policy)
    assert {float(state["step"]) for state in inner.optimizer.state.values()} == {6.0}


def test_first_tokens_have_zero_logprob_and_all_results_are_aligned(moe: Policy) -> None:
    sequences = make_sequences()
    logprobs, entropy = moe.logprobs(sequences, entropy=True)
    assert [len(found) for found in logprobs] == [len(s) for s in sequences]
    assert all(found[0] == 0.0 for found in logprobs + entropy)
    assert all((found[1:] < 0).all() for found in logprobs)


def test_saved_checkpoint_loads_in_transformers_and_back(
    references: Path, moe: Policy, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    (references / "moe" / "model" / "tokenizer_config.json").write_text("{}")
    moe.save_hf(tmp_path / "final")
    one_real_step(moe)
    moe.save_hf(tmp_path / "final")  # replaces the first
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    sequence = make_sequences()[0]
    expected, _ = reference_forward(model, sequence)
    np.testing.assert_allclose(moe.logprobs([sequence])[0], expected.detach(), rtol=0, atol=2e-5)
    assert (tmp_path / "final" / "tokenizer_config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert len({path.stat().st_mode for path in (tmp_path / "final").glob("*.*s*")}) == 1, "all as readable"
    before = snapshot_of(moe)
    check_unchanged(build(tmp_path / "final"), before)


def test_shards_of_a_large_checkpoint_are_indexed_and_read(moe: Policy, tmp_path: Path) -> None:
    from megatron_async.engine.hf_export import CheckpointWriter

    source = shutil.copytree(moe.model_config.path, tmp_path / "source")
    (source / training_record.FILE).write_text("of the weights that these came from")
    writer = CheckpointWriter(tmp_path / "sharded", source, torch.float32, shard_bytes=20_000)
    for name, tensor in moe.export():
        assert tensor is not None
        writer.add(name, tensor)
    writer.finish()
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert not (tmp_path / "sharded" / training_record.FILE).exists()
    check_unchanged(build(tmp_path / "sharded"), snapshot_of(moe))


def test_loading_reaches_the_optimizer(references: Path, tmp_path: Path) -> None:
    source = references / "moe" / "model"
    loaded = snapshot_of(build(source, dtype="bfloat16"))
    other = rewrite(source, tmp_path / "other", {"model.norm.weight": torch.full((32,), 2.0)})
    policy = build(other, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-9))
    policy.load_hf(source)
    # A step far below bf16 resolution rewrites the weights from the masters: they must be the loaded ones.
    one_real_step(policy)
    check_unchanged(policy, loaded)


def rewrite(source: Path, target: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """A copy of a checkpoint with some tensors replaced, added, or (None) left out."""
    tensors = load_file(source / "model.safetensors") | {k: v for k, v in change.items() if v is not None}
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(
        {k: v for k, v in tensors.items() if change.get(k, v) is not None}, target / "model.safetensors"
    )
    return target


def test_fused_experts_on_disk_load_the_same(references: Path, moe: Policy, tmp_path: Path) -> None:
    source = references / "moe" / "model"
    tensors = load_file(source / "model.safetensors")
    change: dict[str, torch.Tensor | None] = {}
    for layer in (0, 1, 3):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: [tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(4)]
            for part in ("gate", "up", "down")
        }
        gate_up = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        change |= {
            f"{prefix}.gate_up_proj": torch.stack(gate_up),
            f"{prefix}.down_proj": torch.stack(parts["down"]),
        }
        change |= {f"{prefix}.{e}.{part}_proj.weight": None for e in range(4) for part in parts}
    check_unchanged(build(rewrite(source, tmp_path / "fused", change)), snapshot_of(moe))


def test_names_and_shapes_that_do_not_fit_list_both_sides(
    references: Path, moe: Policy, tmp_path: Path
) -> None:
    source = references / "moe" / "model"
    before = snapshot_of(moe)
    renamed = {"model.norm.weight": None, "model.final_norm.weight": torch.ones(32)}
    with pytest.raises(
        WeightMismatch, match=r"missing \(1\): model.norm.weight\n.*unexpected \(1\): model.final_norm"
    ):
        moe.load_hf(rewrite(source, tmp_path / "renamed", renamed))
    narrow = {"model.layers.1.self_attn.q_proj.weight": torch.zeros(64, 16)}
    with pytest.raises(WeightMismatch, match=r"q_proj.weight: config \(64, 32\), file \(64, 16\)"):
        moe.load_hf(rewrite(source, tmp_path / "narrow", narrow))
    check_unchanged(moe, before)


def test_missing_files_name_the_fix(references: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no config.json.*model.path"):
        build(tmp_path)
    (tmp_path / "config.json").write_bytes((references / "moe" / "model" / "config.json").read_bytes())
    with pytest.raises(CheckpointMissing, match="neither model.safetensors nor"):
        build(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointMissing, match="model-00001-of-00002.safetensors"):
        build(tmp_path)


def test_unsupported_architectures_name_the_field(references: Path, tmp_path: Path) -> None:
    config = json.loads((references / "dense" / "model" / "config.json").read_text())
    for change, message in (
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "'llama' is not supported"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "rope_parameters"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedModelError, match=message):
            HFConfig.from_pretrained(tmp_path)


def test_tokens_outside_the_vocabulary_are_refused(moe: Policy) -> None:
    with pytest.raises(TokenError, match="to 96, but the vocabulary has 96"):
        moe.logprobs([Sequence(np.array([1, 96], np.int32))])


def test_sequences_are_validated() -> None:
    with pytest.raises(ValueError, match="one value per token: 3 tokens"):
        Sequence(np.zeros(3, np.int32), arrays={"advantages": np.zeros(2)})
    with pytest.raises(ValueError, match="temperature 0"):
        Sequence(np.zeros(3, np.int32), temperature=0.0)


def test_scoring_policy_has_no_optimizer(references: Path) -> None:
    policy = build(references / "dense" / "model", optimizer=None)
    assert policy.logprobs(make_sequences()[:1])[0][0] == 0.0
    with pytest.raises(RuntimeError, match="without an optimiser"):
        policy.train_step(make_sequences(), weighted_loss(1))
