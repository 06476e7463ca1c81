"""The memory estimate against the tensors of real training steps of tiny models, counted byte by byte.

What is compared are tensor bytes, not resident memory: at this size the interpreter's own memory drowns the model's.
Activations are the largest sum of storages that autograd held at once (parameters left out).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_async.config import LayoutConfig, ModelConfig, OptimizerConfig, TrainerConfig, from_dict
from megatron_async.config.activations import activations_on_stage, micro_batches_in_flight
from megatron_async.config.estimate import critic_on_stage, memory_on_stage
from megatron_async.config.hf import read_shape
from megatron_async.engine import platform
from megatron_async.engine.critic import Critic
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint

TOKENS = 1024
TOLERANCE = 0.10  # the count leaves out index tensors and a few fp32 numbers per token


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plan")
    write_tiny_checkpoint(folder / "moe", 0, TinyShape())
    write_tiny_checkpoint(folder / "dense", 0, TinyShape(experts=0))
    return {"moe": folder / "moe", "dense": folder / "dense"}


class SavedBytes:
    """Counts the storages that autograd keeps, as they come and go."""

    def __init__(self, ignored: set[int]) -> None:
        self.now = self.peak = 0
        self._ignored = ignored
        self._held: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> _Held:
        return _Held(tensor, self)

    def change(self, tensor: torch.Tensor, by: int) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self._ignored:
            return
        before = self._held.get(key, 0)
        self._held[key] = before + by
        if before == 0 or before + by == 0:
            self.now += by * storage.nbytes()
            self.peak = max(self.peak, self.now)


class _Held:
    """What autograd holds in place of a saved tensor, for as long as it holds it."""

    def __init__(self, tensor: torch.Tensor, counter: SavedBytes) -> None:
        self.tensor, self._counter = tensor, counter
        counter.change(tensor, 1)

    def __del__(self) -> None:
        self._counter.change(self.tensor, -1)


def build(path: Path, dtype: str, *, recompute: bool = False, distributed: bool = True) -> Policy:
    trainer = TrainerConfig(
        micro_batch_tokens=TOKENS, recompute=recompute, use_distributed_optimizer=distributed
    )
    return Policy.build(ModelConfig(str(path), dtype), LayoutConfig(), trainer, OptimizerConfig())


def train(policy: Policy) -> None:
    vocabulary = policy.hf_config.vocab_size
    sequences = [Sequence(np.arange(TOKENS // 4, dtype=np.int32) % vocabulary) for _ in range(4)]
    policy.train_step(sequences, lambda packed, logprobs, entropy: (logprobs.sum() / TOKENS, {}))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_activations_are_what_autograd_keeps(checkpoints, kind, dtype, recompute):
    policy = build(checkpoints[kind], dtype, recompute=recompute)
    counter = SavedBytes({p.untyped_storage().data_ptr() for m in policy.models for p in m.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda held: held.tensor):
        train(policy)
    platform.shutdown()
    width = 4 if dtype == "float32" else 2
    shape = read_shape(checkpoints[kind])
    estimate = activations_on_stage(
        shape, LayoutConfig(), 0, tokens=TOKENS, width=width, recompute=recompute, fused=False
    )
    # The gradient of the logits is in the estimate, but autograd does not keep it.
    logits = estimate.logits - TOKENS * width * shape.vocabulary
    expected = estimate.layers + max(logits, estimate.recomputed)
    assert counter.peak == pytest.approx(expected, rel=TOLERANCE)
    assert counter.now == 0, "everything kept for the backward pass is let go"


def storages(tensors) -> int:
    """Bytes of the distinct storages behind some tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(
    ("dtype", "distributed"), [("float32", True), ("bfloat16", True), ("bfloat16", False)]
)
def test_weights_gradients_and_optimiser_are_what_megatron_allocates(checkpoints, dtype, distributed):
    policy = build(checkpoints["moe"], dtype, distributed=distributed)
    train(policy)
    inner = policy.optimizer.inner_optimizers()
    states = [
        t for o in inner for state in o.optimizer.state.values() for t in state.values() if t.numel() > 1
    ]
    # The masters of fp32 weights are the weights themselves.
    masters = policy.masters() if dtype == "bfloat16" else []
    gradients = [
        buffer.grad_data for c in policy.chunks for buffer in (*c.buffers, *c.expert_parallel_buffers)
    ]
    held = {
        "weights": storages(p for m in policy.models for p in m.parameters()),
        "gradients": storages(gradients),
        "optimizer": storages(states) + storages(masters),
    }
    platform.shutdown()
    config = from_dict(
        {
            "name": "m",
            "model": {"path": str(checkpoints["moe"]), "dtype": dtype},
            "trainer": {"use_distributed_optimizer": distributed},
        }
    )
    estimate = memory_on_stage(read_shape(checkpoints["moe"]), config, 0)
    for name, nbytes in held.items():
        assert getattr(estimate, name) == pytest.approx(nbytes, rel=TOLERANCE), name


@pytest.mark.parametrize("kind", ["moe", "dense"])
@pytest.mark.parametrize(
    "freeze",
    [
        {},
        {"freeze": "none"},
        {"freeze_norms": True, "freeze_embeddings": True},
    ],
)
def test_a_critic_holds_and_trains_what_the_plan_says(checkpoints, kind, freeze):
    sections = {"critic": freeze, "advantage": {"name": "gae", "drop_zero_variance_groups": False}}
    config = from_dict({"name": "m", "model": {"path": str(checkpoints[kind])}, **sections})
    critic = Critic.build(config.model, config.layout, config.trainer, critic=config.critic)
    parameters = [p for model in critic.models for p in model.parameters()]
    platform.shutdown()
    estimate = critic_on_stage(read_shape(checkpoints[kind]), config, 0)
    assert estimate.parameters.total == sum(p.numel() for p in parameters)
    assert estimate.gradients == 4 * sum(p.numel() for p in parameters if p.requires_grad)


def test_cutting_saves_what_it_says(checkpoints):
    """Tensor parallel with sequence parallel halves everything but the router's part; context parallel is the caller's
    (tokens are those of one rank)."""
    shape = read_shape(checkpoints["dense"])
    sizes = {"tokens": TOKENS, "width": 2, "recompute": False, "fused": False}
    whole = activations_on_stage(shape, LayoutConfig(), 0, **sizes).total
    half = activations_on_stage(
        shape, LayoutConfig(world_size=2, tensor_model_parallel_size=2), 0, **sizes
    ).total
    angles = shape.layers * TOKENS * 4 * 2 * shape.head_dim  # RoPE's angles are on every rank
    assert half - angles == pytest.approx((whole - angles) / 2, rel=1e-3)
    fused = activations_on_stage(shape, LayoutConfig(), 0, **{**sizes, "fused": True}).total
    assert 0.4 * whole < fused < whole


def test_micro_batches_in_flight_under_1f1b():
    """Stage s of p holds p - s; interleaved with v chunks, stage 0 holds (2 (p - 1) + (v - 1) p + 1) / v."""
    layout = LayoutConfig(world_size=4, pipeline_model_parallel_size=4)
    assert [micro_batches_in_flight(layout, stage) for stage in range(4)] == [4, 3, 2, 1]
    chunks = LayoutConfig(
        world_size=4, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2
    )
    assert micro_batches_in_flight(chunks, 0) == (6 + 4 + 1) / 2
