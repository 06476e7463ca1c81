"""What the bank's operations cost, and whether the cost grows with the number of trajectories it has seen.

Two banks are filled with trained trajectories, a small and a large one. Then both do the same work in turns, so that
the machine's moods fall on both: collect a batch of new groups, poll, take the batch, commit it. Each operation's
median in the large bank is divided by its median in the small one.

    python -m tools.benchmark_bank --folder /tmp/banks --fill-only        # minutes for 1,000,000
    python -m tools.benchmark_bank --folder /tmp/banks --write            # under a minute; banks there are used again
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection, Engine, insert, update

from megatron_async.bank import Bank, State, dialects
from megatron_async.bank.tables import groups, payloads, prompts, state_counts, steps, trajectories
from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan
from tools.benchmark_rows import Row, write_rows

GROUPS, GROUP_SIZE = 16, 8
TOKENS = 64
TAKES = 4  # per round; all but the last are rolled back
Samples = dict[str, list[float]]


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        urls = [_filled(folder, size) for size in (args.small, args.size)]
        if not args.fill_only:
            samples = measure(urls, args.rounds)
            rows = report(samples, args)
            if args.write:
                write_rows("async", rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=1_000_000, help="trained trajectories in the large bank")
    parser.add_argument("--small", type=int, default=10_000, help="trained trajectories in the small bank")
    parser.add_argument(
        "--rounds", type=int, default=12, help="batches collected, taken and committed per bank"
    )
    parser.add_argument("--folder", help="keep the filled banks here and use those that are there")
    parser.add_argument("--fill-only", action="store_true")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/async.json")
    return parser.parse_args()


# ---------------------------------------------------------------------- filling


def _filled(folder: Path, size: int) -> str:
    path = folder / f"bank-{size}.sqlite"
    url = f"sqlite:///{path}"
    if not path.exists():
        started = time.perf_counter()
        Bank.open(url).close()
        engine = dialects.writing(dialects.make_engine(url))
        _fill(engine, size)
        engine.dispose()
        print(f"filled {url} with {size:,} trained trajectories in {time.perf_counter() - started:.0f} s")
    return url


def _fill(engine: Engine, size: int) -> None:
    """Write history directly: the same rows as `size` trajectories that went through the whole machine.

    The triggers are lifted for it, because history does not start as `running`.
    """
    payload = _ended(_started("t", "g")).to_bytes()
    with engine.begin() as conn:
        for trigger in ("trajectory_start", "trajectory_state"):
            conn.exec_driver_sql(f"DROP TRIGGER {trigger}")
        count = size // GROUP_SIZE
        for first in range(0, count, 5_000):
            _fill_groups(conn, range(first, min(first + 5_000, count)), payload)
        trained = {"n": count * GROUP_SIZE}
        conn.execute(update(state_counts).where(state_counts.c.state == State.TRAINED.value).values(trained))
        dialects.create_state_trigger(conn)


def _fill_groups(conn: Connection, numbers: range, payload: bytes) -> None:
    conn.execute(insert(prompts), [{"prompt_id": f"h{n}", "task": "{}", "created_at": 0.0} for n in numbers])
    conn.execute(
        insert(groups),
        [{"position": n + 1, "group_id": f"h{n}", "prompt_id": f"h{n}", "done": True} for n in numbers],
    )
    members = [(n, m) for n in numbers for m in range(GROUP_SIZE)]
    conn.execute(insert(trajectories), [_history(n, m) for n, m in members])
    conn.execute(insert(payloads), [{"position": _position(n, m), "data": payload} for n, m in members])
    firsts = [n for n in numbers if n % GROUPS == 0]
    conn.execute(insert(steps), [_step(n // GROUPS) for n in firsts])


def _position(group: int, member: int) -> int:
    return group * GROUP_SIZE + member + 1


def _history(group: int, member: int) -> dict[str, Any]:
    return {
        "position": _position(group, member),
        "trajectory_id": f"h{group}.{member}",
        "group_position": group + 1,
        "state": State.TRAINED.value,
        "status": Status.OK.value,
        "reward": float(member % 2),
        "tokens": TOKENS + 8,
        "action_tokens": TOKENS,
        "min_version": group // GROUPS,
        "max_version": group // GROUPS,
        "step": group // GROUPS,
        "started_at": 0.0,
        "finished_at": 1.0,
    }


def _step(step: int) -> dict[str, Any]:
    batch = GROUPS * GROUP_SIZE
    return {
        "step": step,
        "state": "committed",
        "version_before": step,
        "version_after": step + 1,
        "trajectories": batch,
        "metrics": "{}",
        "reserved_at": 0.0,
        "committed_at": 1.0,
    }


# ---------------------------------------------------------------------- measuring


def measure(urls: list[str], rounds: int) -> list[Samples]:
    """Seconds of every call, per operation, for each bank; the first round warms up and is left out."""
    banks = [Bank.open(url) for url in urls]
    samples: list[Samples] = [defaultdict(list) for _ in banks]
    first_steps = [len(bank.steps()) for bank in banks]
    for number in range(rounds + 1):
        for bank, kept, first in zip(banks, samples, first_steps):
            for operation, seconds in _round(bank, first + number):
                if number:
                    kept[operation].append(seconds)
    for bank in banks:
        bank.close()
    return samples


def _round(bank: Bank, step: int) -> Iterator[tuple[str, float]]:
    for g in range(GROUPS):
        for m in range(GROUP_SIZE):
            trajectory = _started(f"s{step}.{g}.{m}", f"s{step}.{g}")
            yield "start", _seconds(partial(bank.start_trajectory, trajectory))
            _ended(trajectory)
            yield "finish", _seconds(partial(bank.finish_trajectory, trajectory))
    for _ in range(20):
        yield "poll", _seconds(lambda: (bank.current_version(), bank.admitted(), bank.peek_ready(GROUP_SIZE)))
    for again in range(TAKES):
        if again:
            yield "rollback", _seconds(bank.rollback_uncommitted)
        started = time.perf_counter()
        batch = bank.take_batch(step, GROUPS, GROUP_SIZE, 0)
        yield "take", time.perf_counter() - started
        assert batch is not None and len(batch) == GROUPS * GROUP_SIZE
    yield "commit", _seconds(lambda: bank.commit_step(step, 0, 0))


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _started(trajectory_id: str, group_id: str) -> Trajectory:
    trajectory = Trajectory(trajectory_id, group_id, f"p{group_id}", SamplingParams(), {"seed": 1})
    trajectory.append_context(range(8))
    return trajectory


def _ended(trajectory: Trajectory) -> Trajectory:
    rng = np.random.default_rng(0)
    ids, logprobs = rng.integers(0, 4096, TOKENS), -rng.exponential(1.0, TOKENS)
    trajectory.append_action(ids, logprobs, [VersionSpan(0, 0, TOKENS)], "stop")
    trajectory.finish(Status.OK, 1.0)
    return trajectory


# ---------------------------------------------------------------------- reporting


def report(samples: list[Samples], args: argparse.Namespace) -> list[Row]:
    small, large = samples
    ratios: dict[str, float] = {}
    print(f"{'operation':10} {args.small:>12,} {args.size:>12,}  ratio   (median ms)")
    for operation in small:
        few, many = (statistics.median(s[operation]) * 1e3 for s in (small, large))
        ratios[operation] = many / few
        print(f"{operation:10} {few:12.2f} {many:12.2f} {many / few:6.2f}")
    take = statistics.median(large["take"]) * 1e3
    setting = f"SQLite, {args.size:,} trained trajectories, batch {GROUPS} groups of {GROUP_SIZE}, {TOKENS} tokens each"
    order = ", ".join(ratios)
    return [
        Row(
            "bank_take_ms",
            round(take, 2),
            "ms",
            "<= 50",
            f"{setting}; median of {args.rounds}, decoding included",
        ),
        Row(
            "bank_growth",
            [round(ratio, 3) for ratio in ratios.values()],
            "",
            "<= 1.2",
            f"{setting}; median cost against {args.small:,}, in turns: {order}",
        ),
    ]


if __name__ == "__main__":
    main()
