"""Milliseconds of skip-observation GAE over a million tokens, wall time on two cores: [gae_ms].

The batch is like an agent's: trajectories of log-normal length, turns of some hundred action tokens with observations
between them, length-adaptive λ, the reward on the last token. Checked against a float64 loop before it is timed.

    python -m tools.benchmark_gae
"""

from __future__ import annotations

import time

import numpy as np
import torch

from megatron_async.advantages import length_adaptive_lambda, skip_observation_gae
from tools.benchmark_rows import Row, write_rows

TOKENS = 1_000_000
REPEATS = 25
THREADS = 2


def make_batch(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """rewards, values, action_mask, sequence_ids: [tokens]."""
    random = np.random.default_rng(seed)
    lengths = np.minimum(random.lognormal(np.log(4000), 0.8, tokens // 500).astype(np.int64) + 2, 32_768)
    ids = np.repeat(np.arange(len(lengths)), lengths)[:tokens]
    turns = random.geometric(1 / 200, tokens // 50)
    mask = np.repeat(np.arange(len(turns)) % 2 == 0, turns)[:tokens]
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    mask[starts] = True
    rewards = np.zeros(tokens, np.float32)
    rewards[np.append(starts[1:], tokens) - 1] = random.random(len(starts)) < 0.5
    values = random.random(tokens).astype(np.float32)
    arrays = {"rewards": rewards, "values": values, "action_mask": mask, "sequence_ids": ids}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def estimate(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What is timed: λ of every trajectory, advantages and returns."""
    return skip_observation_gae(
        **batch, lam=length_adaptive_lambda(batch["action_mask"], batch["sequence_ids"])
    )


def loop(batch: dict[str, torch.Tensor]) -> np.ndarray:
    """Advantages by a float64 loop over the tokens, backwards."""
    rewards, values, mask, ids = (batch[name].tolist() for name in batch)
    lengths: dict[int, int] = {}
    for sequence, action in zip(ids, mask, strict=True):
        lengths[sequence] = lengths.get(sequence, 0) + action
    advantages, current, following, carried, earned = np.zeros(len(ids)), -1, 0.0, 0.0, 0.0
    for t in range(len(ids) - 1, -1, -1):
        if ids[t] != current:
            current, following, carried, earned = ids[t], 0.0, 0.0, 0.0
        earned += rewards[t]
        if mask[t]:
            lam = 1.0 - 1.0 / (1.5 * lengths[current])
            carried = earned + following - values[t] + lam * carried
            advantages[t], following, earned = carried, values[t], 0.0
    return advantages


def main() -> None:
    """Check, time, write docs/benchmarks/sao.json."""
    small = make_batch(50_000)
    np.testing.assert_allclose(estimate(small)[0].numpy(), loop(small), rtol=1e-5, atol=1e-6)
    torch.set_num_threads(THREADS)
    batch = make_batch(TOKENS)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        estimate(batch)
        seconds.append(time.perf_counter() - started)
    text = (
        f"{TOKENS:,} packed tokens of {int(batch['sequence_ids'][-1]) + 1} trajectories, adaptive λ; "
        f"wall time of {THREADS} threads, median of {REPEATS}"
    )
    write_rows("sao", [Row("gae_ms", round(1e3 * float(np.median(seconds)), 1), "ms", "<= 50", text)])


if __name__ == "__main__":
    main()
