"""How full packed micro-batches are on long-tailed lengths: [packing_fill], and what sharing them over ranks costs.

    python -m tools.benchmark_packing --write

Lengths as agents' trajectories have them: log-normal with median 403 tokens and sigma 1, cut at the budget.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from megatron_async.engine.packing import pack
from tools.benchmark_rows import Row, write_rows

BUDGET = 4096
SEQUENCES = (128, 512, 2048)
RANKS = 8


def lengths(count: int, seed: int) -> list[int]:
    """Tokens per sequence."""
    drawn = np.random.default_rng(seed).lognormal(6.0, 1.0, count)
    return [int(n) for n in np.clip(drawn, 8, BUDGET)]


def main() -> int:
    """Measure, print, and with --write keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/megatron.json")
    options = parser.parse_args()
    rows = []
    for ranks, name, goal in ((1, "packing_fill", ">= 0.95"), (RANKS, f"packing_fill_{RANKS}_ranks", "")):
        started = time.perf_counter()
        fills = [
            float(np.mean([pack(lengths(count, seed), budget=BUDGET, ranks=ranks).fill for seed in range(5)]))
            for count in SEQUENCES
        ]
        seconds = time.perf_counter() - started
        conditions = (
            f"{', '.join(map(str, SEQUENCES))} sequences, log-normal lengths (median 403, sigma 1), {BUDGET} tokens a "
            f"micro-batch, {ranks} data-parallel rank(s), mean of 5 seeds; {seconds:.1f} s for all"
        )
        rows.append(Row(name, fills, "", goal, conditions))
        print(name, fills)
    if options.write:
        write_rows("megatron", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
