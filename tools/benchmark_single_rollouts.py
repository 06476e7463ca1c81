"""What waiting for groups costs: single rollouts (SAO) against groups of eight (GRPO), as many trajectories a step.

A group is trained when its last member has finished, and the first ones meanwhile grow stale: with a long tail of
lengths every group of eight waits for one of its long members. Same rollout, admission and bank (the product's), same
scripted engine, same tools and the same bound on staleness as `tools.benchmark_async`; updates take --balance times as
long as generation does per step, measured first with single rollouts alone.

    python -m tools.benchmark_single_rollouts --model runs/tiny --write      # four minutes on two idle cores
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from megatron_async.config.schema import BatchConfig
from tools.benchmark_async import CONCURRENCY, MODES, Measured, add_work, measure, say, setting, told
from tools.benchmark_rows import Row, write_rows

SHAPES = {"groups of 8": BatchConfig(groups=8, group_size=8), "single": BatchConfig(groups=64, group_size=1)}
LAGS = (MODES["synchronous"], MODES["asynchronous"])


def main() -> int:
    args = arguments()
    alone = measure(args, "single rollouts alone", 10 * args.steps, 0.0, SHAPES["single"])
    update_s = args.balance * alone.seconds / args.steps
    for lag in LAGS:
        found = {
            shape: measure(args, f"{shape}, staleness at most {lag}", lag, update_s, batch)
            for shape, batch in SHAPES.items()
        }
        for row in (made := rows(found, lag, update_s, args.steps)):
            say(f"{row.figure}: {row.value}")
        if args.write:
            write_rows("sao", made)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--write", action="store_true", help="write rows of docs/benchmarks/sao.json")
    return parser.parse_args()


def rows(found: Mapping[str, Measured], lag: int, update_s: float, steps: int) -> list[Row]:
    grouped, single = found["groups of 8"], found["single"]
    conditions = (
        f"{steps} steps of 64 trajectories, {CONCURRENCY} episodes at once, staleness at most {lag}; {setting()}, "
        f"updates of {update_s:.2f} s that wait; groups of 8 {told(grouped)}, single {told(single)}"
    )
    name = f"single_rollouts_lag{lag}"
    return [
        Row(f"{name}_trainer_utilisation", [round(v.trainer, 3) for v in (grouped, single)], "", "", conditions),
        Row(f"{name}_engine_utilisation", [round(v.engine, 3) for v in (grouped, single)], "", "", conditions),
        Row(f"{name}_speedup", round(single.rate / grouped.rate, 3), "", "> 1", conditions),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
