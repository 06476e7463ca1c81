"""What the objectives cost: kernel against plain PPO [kernel_cost_max], metrics against a step [metrics_share].

Kernel: loss forward and backward over a million packed tokens, every preset with its defaults, against PPO's loss
written by hand with autograd, both in turns in one process; the least time of each counts, since load only ever adds.
Metrics: the time that counting them adds to the loss, plus naming them, as a share of `Policy.train_step` on a tiny
Qwen3-MoE.

    python -m tools.benchmark_objectives [--tokens 1000000] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_async.config.methods import METHODS
from megatron_async.config.schema import (
    LayoutConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainerConfig,
)
from megatron_async.objectives import (
    BatchState,
    LossOutput,
    Normaliser,
    Objective,
    TokenBatch,
    build_objective,
)
from tools.benchmark_rows import Row, write_rows

SEQUENCE, TURN, OBSERVATION = 2000, 100, 50
METRICS_SHARE_GOAL = 0.02


def make_batch(tokens: int) -> tuple[Tensor, TokenBatch]:
    """log π_θ and a batch shaped as agents' are: turns between observations, one advantage per trajectory."""
    torch.manual_seed(0)
    at = torch.arange(tokens)
    trajectory = at // SEQUENCE
    logprobs = -2 * torch.rand(tokens)
    rollout = logprobs + 0.02 * torch.randn(tokens)
    batch = TokenBatch(
        rollout_logprobs=rollout,
        anchor_logprobs=rollout + 0.005 * torch.randn(tokens),
        advantages=torch.randn(int(trajectory[-1]) + 1)[trajectory],
        action_mask=at % (TURN + OBSERVATION) >= OBSERVATION,
        sequence_ids=trajectory,
        version_gap=at // 700 % 4,
        rewards=(trajectory % 2).float(),
    )
    return logprobs, batch


def plain_ppo(logprobs: Tensor, batch: TokenBatch, tokens: int) -> Tensor:
    """Coupled PPO as one writes it with autograd."""
    ratio = torch.exp(torch.where(batch.action_mask, logprobs - batch.rollout_logprobs, 0.0))
    surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    return -torch.where(batch.action_mask, surrogate, 0.0).sum() / tokens


def kernel_loss(
    objective: Objective, logprobs: Tensor, batch: TokenBatch, normaliser: Normaliser, state: BatchState
) -> Tensor:
    """The preset's loss without metrics."""
    return objective.loss(logprobs, batch, normaliser, state=state, metrics=False).loss


def seconds_of(loss: Callable[[], Tensor], logprobs: Tensor) -> float:
    """Forward and backward of one loss."""
    logprobs.grad = None
    start = time.perf_counter()
    loss().backward()
    return time.perf_counter() - start


def kernel_ratios(tokens: int, repeats: int) -> dict[str, float]:
    """Time of each preset's kernel over plain PPO's."""
    values, batch = make_batch(tokens)
    logprobs, normaliser = values.requires_grad_(), Normaliser.count(batch)
    ratios = {}
    for name in METHODS:
        objective = build_objective(ObjectiveConfig(name=name))
        state = objective.prepare(batch, values.detach(), lambda gathered: gathered)
        losses = (
            partial(plain_ppo, logprobs, batch, normaliser.tokens),
            partial(kernel_loss, objective, logprobs, batch, normaliser, state),
        )
        times = [[seconds_of(loss, logprobs) for loss in losses] for _ in range(repeats + 1)][1:]
        plain, kernel = (min(column) for column in zip(*times, strict=True))
        ratios[name] = kernel / plain
        print(
            f"{name:<12} plain PPO {plain * 1e3:6.1f} ms   kernel {kernel * 1e3:6.1f} ms   ratio {ratios[name]:.2f}"
        )
    return ratios


def metrics_share(repeats: int, sequences: int, longest: int) -> tuple[float, float]:
    """Median share of a training step spent on metrics, and the step's seconds."""
    from megatron_async.engine import platform
    from megatron_async.engine.policy import Policy
    from megatron_async.engine.sequences import Packed, Sequence
    from megatron_async.rollout.environments.desk_checkpoint import write_tiny_checkpoint

    objective = build_objective(ObjectiveConfig(name="decoupled"))
    random = np.random.default_rng(0)
    spent = {"with": 0.0, "without": 0.0}

    def sequence(vocab: int) -> Sequence:
        length = int(random.integers(longest // 2, longest + 1))
        mask = np.arange(length) % (TURN + OBSERVATION) >= OBSERVATION
        arrays: dict[str, np.ndarray] = {
            "rollout_logprobs": -random.random(length).astype(np.float32),
            "advantages": np.full(length, random.normal(), np.float32),
            "version_gap": np.full(length, random.integers(0, 3), np.int64),
            "action_mask": mask,
        }
        return Sequence(random.integers(0, vocab, length).astype(np.int32), 1.0, arrays)

    def timed(loss: Callable[[], LossOutput], name: str) -> LossOutput:
        start = time.perf_counter()
        result = loss()
        spent[name] += time.perf_counter() - start
        return result

    def loss_fn(packed: Packed, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        arrays = packed.arrays
        batch = TokenBatch(
            arrays["rollout_logprobs"], None, arrays["advantages"], arrays["action_mask"].bool(),
            packed.sequence_ids, arrays["version_gap"],
        )  # fmt: skip
        objective.loss(logprobs, batch, normaliser, metrics=False)  # warms the caches for both
        timed(lambda: objective.loss(logprobs, batch, normaliser, metrics=False), "without")
        counted = timed(lambda: objective.loss(logprobs, batch, normaliser), "with")
        return counted.loss, counted.stats

    with tempfile.TemporaryDirectory() as scratch:
        write_tiny_checkpoint(Path(scratch) / "model", seed=0)
        policy = Policy.build(
            ModelConfig(f"{scratch}/model", "float32"), LayoutConfig(), TrainerConfig(), OptimizerConfig()
        )
        batch = [sequence(policy.hf_config.vocab_size) for _ in range(sequences)]
        normaliser = Normaliser(int(sum(s.arrays["action_mask"].sum() for s in batch)), len(batch))
        shares, steps = [], []
        for _ in range(repeats + 1):
            spent.update({"with": 0.0, "without": 0.0})
            start = time.perf_counter()
            result = policy.train_step(batch, loss_fn)
            step = (
                time.perf_counter() - start - 3 * spent["without"]
            )  # three of the four losses are the benchmark's
            added = spent["with"] - spent["without"] + _naming(objective, result.stats)
            shares.append(added / step)
            steps.append(step)
        platform.shutdown()
    return statistics.median(shares[1:]), statistics.median(steps[1:])


def _naming(objective: Objective, stats: dict[str, np.ndarray]) -> float:
    """Seconds that turning the reduced sums into named metrics takes, once per step."""
    start = time.perf_counter()
    objective.summarise({name: torch.from_numpy(np.asarray(value)) for name, value in stats.items()})
    return time.perf_counter() - start


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=32, help="trajectories of the training step")
    parser.add_argument("--longest", type=int, default=800, help="longest of them, in tokens")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/objectives.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    ratios = kernel_ratios(options.tokens, options.repeats)
    share, step = metrics_share(5, options.sequences, options.longest)
    worst = max(ratios, key=lambda name: ratios[name])
    print(f"dearest kernel: {worst} {ratios[worst]:.2f}; metrics {share:.2%} of a step of {step:.2f} s")
    if options.write:
        record(options, ratios, share, step)


def record(options: argparse.Namespace, ratios: dict[str, float], share: float, step: float) -> None:
    """Write the rows of docs/benchmarks/objectives.json."""
    kernel = (
        f"{options.tokens} tokens, float32, 1 thread, least of {options.repeats} runs in turns with plain PPO"
    )
    each = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    training = (
        f"tiny Qwen3-MoE, 1 rank, {options.sequences} trajectories up to {options.longest} tokens, step {step:.2f} s, "
        "objective decoupled, median of 5"
    )
    write_rows(
        "objectives",
        [
            Row("kernel_cost_max", round(max(ratios.values()), 2), "", "<= 1.5", f"{kernel}; {each}"),
            Row("metrics_share", round(share, 4), "", f"<= {METRICS_SHARE_GOAL}", training),
        ],
    )


if __name__ == "__main__":
    main()
