"""Tokens/s of Policy.train_step against a bare Megatron loop on the same batch: [trainer_tokens_ratio].

The bare loop is what one writes by hand: GPTModel with labels, Megatron's DDP, schedule, optimiser and cross-entropy,
on micro-batches packed beforehand. Policy.train_step additionally packs, computes entropy and temperature, calls a
loss function, and returns log-probs and statistics to every rank. Both run in this process, on the same model and
micro-batches, in turns; the figure is the ratio of the medians.

    python -m tools.benchmark_trainer [--model DIRECTORY] [--write]
    torchrun --nproc-per-node 2 -m tools.benchmark_trainer --expert-parallel 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.config.schema import LayoutConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megatron_async.engine import platform
from megatron_async.engine.model import DTYPES
from megatron_async.engine.optimizer import Optimizer, wrap_ddp
from megatron_async.engine.packing import pack
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import BatchIndex, Cut, MicroBatch, Packed, Sequence, build_micro_batch
from megatron_async.rollout.environments.desk_checkpoint import write_tiny_checkpoint

from megatron.core import parallel_state  # isort: skip  (the engine prepares Megatron's platform first)
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip

OPTIMIZER = OptimizerConfig(lr=1e-6)


def make_batch(count: int, longest: int, vocab: int) -> list[Sequence]:
    """Sequences of uneven length, half of whose tokens carry an advantage."""
    random = np.random.default_rng(0)
    sequences = []
    for length in random.integers(longest // 4, longest + 1, count):
        mask = random.random(length) < 0.5
        arrays = {"advantages": random.normal(size=length).astype(np.float32), "action_mask": mask}
        sequences.append(Sequence(random.integers(0, vocab, length).astype(np.int32), 1.0, arrays))
    return sequences


def policy_step(policy: Policy, sequences: list[Sequence]) -> None:
    """One step through the product, with a policy-gradient loss."""
    total = sum(int(sequence.arrays["action_mask"].sum()) for sequence in sequences)

    def loss_fn(packed: Packed, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        terms = packed.arrays["advantages"] * logprobs
        loss = -torch.where(packed.arrays["action_mask"], terms, 0.0).sum() / total
        return loss, {"entropy": entropy.detach().sum()}

    policy.train_step(sequences, loss_fn)


class BareLoop:
    """Megatron by hand on this rank's ready-made micro-batches."""

    def __init__(
        self, model: ModelConfig, layout: LayoutConfig, trainer: TrainerConfig, batches: list[MicroBatch]
    ) -> None:
        # The same weights as the policy's, so that tokens are routed alike.
        scorer = Policy.build(model, layout, trainer)
        config, chunks = scorer.transformer_config, scorer.models
        distributed = trainer.use_distributed_optimizer
        self.chunk = wrap_ddp(config, chunks, distributed_optimizer=distributed)[0]
        self.optimizer = Optimizer(
            OPTIMIZER, [self.chunk], dtype=DTYPES[model.dtype], distributed=distributed
        )
        self.batches = batches
        self.total = sum(len(batch.packed) for batch in batches) * dist.get_world_size()

    def step(self) -> None:
        """Forward, backward and optimiser step."""
        self.chunk.train()
        self.chunk.zero_grad_buffer()
        self.optimizer.megatron.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(self.batches),
            model=self.chunk,
            num_microbatches=len(self.batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.schedule.step(1)
        self.optimizer.megatron.step()

    def _forward(self, iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(iterator)
        losses = model(
            batch.input_ids,
            batch.position_ids,
            None,
            labels=batch.targets[None],
            packed_seq_params=batch.attention,
        )
        return losses, partial(self._loss, batch)

    def _loss(self, batch: MicroBatch, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss = losses.flatten()[batch.take].sum() / self.total
        return loss, torch.tensor(len(batch.packed), dtype=torch.int), {"loss": loss.detach().clone()}


def rank_micro_batches(policy: Policy, sequences: list[Sequence], budget: int) -> list[MicroBatch]:
    """This rank's micro-batches, cut as the policy cuts them."""
    batch = BatchIndex(sequences)
    plan = pack(batch.lengths, budget=budget, ranks=parallel_state.get_data_parallel_world_size())
    tensor_parallel = policy.layout.tensor_model_parallel_size
    cut = Cut(tensor_parallel, 1, 0, platform.setup().device)
    return [
        build_micro_batch(batch, members, cut)
        for members in plan.micro_batches[parallel_state.get_data_parallel_rank()]
    ]


def timed(step: Callable[[], None]) -> float:
    """Seconds of one step, all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    step()
    platform.setup().synchronize()
    return time.perf_counter() - start


def measure(options: argparse.Namespace, model_path: str) -> dict[str, float]:
    """Medians of both loops, in tokens/s."""
    layout = LayoutConfig(
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        tensor_model_parallel_size=options.tensor_parallel,
        expert_model_parallel_size=options.expert_parallel,
    )
    trainer = TrainerConfig(micro_batch_tokens=options.micro_batch_tokens)
    model = ModelConfig(path=model_path, dtype=options.dtype)
    policy = Policy.build(model, layout, trainer, OPTIMIZER)
    sequences = make_batch(options.sequences, options.longest, policy.hf_config.vocab_size)
    bare = BareLoop(model, layout, trainer, rank_micro_batches(policy, sequences, options.micro_batch_tokens))
    seconds: dict[str, list[float]] = {"policy": [], "bare": []}
    steps: dict[str, Callable[[], None]] = {
        "policy": partial(policy_step, policy, sequences),
        "bare": bare.step,
    }
    for repeat in range(options.repeats + 1):
        order = ("policy", "bare") if repeat % 2 else ("bare", "policy")
        for name in order:
            elapsed = timed(steps[name])
            if repeat > 0:  # the first of each warms caches up
                seconds[name].append(elapsed)
    tokens = sum(len(sequence) for sequence in sequences)
    return {name: tokens / statistics.median(values) for name, values in seconds.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="checkpoint directory (default: a new tiny Qwen3-MoE)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--longest", type=int, default=384, help="longest sequence, in tokens")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/trainer.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        model_path = options.model
        if not model_path:
            model_path = f"{scratch}/model"
            write_tiny_checkpoint(Path(model_path), seed=0)
        found = measure(options, model_path)
    if dist.get_rank() == 0:
        ratio = found["policy"] / found["bare"]
        print(f"policy {found['policy']:.0f} tokens/s, bare {found['bare']:.0f} tokens/s, ratio {ratio:.3f}")
        if options.write:
            record(options, found)
    platform.shutdown()


def record(options: argparse.Namespace, found: dict[str, float]) -> None:
    """Write the rows of docs/benchmarks/trainer.json."""
    from tools.benchmark_rows import Row, write_rows

    conditions = (
        f"{dist.get_world_size()} rank(s), TP {options.tensor_parallel}, EP {options.expert_parallel}, "
        f"{options.dtype}, {options.sequences} sequences up to {options.longest} tokens, micro-batches of "
        f"{options.micro_batch_tokens}, medians of {options.repeats} steps taken in turns"
    )
    ratio = found["policy"] / found["bare"]
    write_rows(
        "trainer",
        [
            Row("trainer_tokens_ratio", round(ratio, 3), "", ">= 0.95", conditions),
            Row("trainer_tokens_per_second", round(found["policy"]), "tokens/s", "", conditions),
            Row("bare_megatron_tokens_per_second", round(found["bare"]), "tokens/s", "", conditions),
        ],
    )


if __name__ == "__main__":
    main()
