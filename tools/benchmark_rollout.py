"""One rollout process with many desk agents, against a scripted engine: how late its event loop is, and its memory.

The rollout process is the product's; the engine (`tools.scripted_endpoint`) and what takes batches out of the bank are
processes of their own. Lag: how much later than asked the event loop wakes a sleeper, sampled every 50 ms while all
agents play. Memory per agent: growth of the process from before the first to while all play, by their number.

    python -m tools.benchmark_rollout --model runs/tiny --agents 1000 --write
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from megatron_async.bank import Bank
from megatron_async.bank.requests import PHASE, TRAINING
from megatron_async.config.schema import BatchConfig, ModelConfig, RolloutConfig, RunConfig
from megatron_async.roster import Engine, write_roster
from megatron_async.supervise import Part, python_module, supervised
from sglang_bridge.server import claim_port
from tools.benchmark_rows import Row, write_rows

LAG_S = 0.05
GROUP_SIZE, GROUPS = 8, 16


def main() -> int:
    args = arguments()
    if args.role == "rollout":
        return asyncio.run(roll_out(args))
    if args.role == "trainer":
        return take_batches(args)
    with tempfile.TemporaryDirectory() as scratch:
        args.folder = Path(scratch)
        found = measure(args)
    print(json.dumps(found, indent=1))
    if args.write:
        write_rows("async", rows(found, args))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory with the desk's tokenizer")
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=40.0, help="of measuring, after all agents play")
    parser.add_argument("--tokens-per-s", type=float, default=20.0, help="of one agent")
    parser.add_argument("--interval", type=int, default=10, help="tokens in one event of a stream")
    parser.add_argument("--median", type=float, default=100.0, help="tokens of a turn")
    parser.add_argument("--flush-s", type=float, default=RolloutConfig().flush_s)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/async.json")
    parser.add_argument("--role", choices=("all", "rollout", "trainer"), default="all", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def configuration(args: argparse.Namespace) -> RunConfig:
    return RunConfig(
        name="run",
        run_dir=str(args.folder),
        model=ModelConfig(path=str(args.model)),
        batch=BatchConfig(groups=GROUPS, group_size=GROUP_SIZE),
        rollout=RolloutConfig(
            max_staleness=args.agents // (GROUPS * GROUP_SIZE) + 2, concurrency=args.agents, max_turns=8,
            max_new_tokens=600, max_tokens=8192, flush_s=args.flush_s,
        ),
    )  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the three processes and wait for the rollout's own measurement."""
    config = configuration(args)
    config.run_path.mkdir(parents=True)
    with Bank.open(config.bank_url) as bank:
        bank.set_state(PHASE, TRAINING)
    port = claim_port("127.0.0.1", 0)
    write_roster(config.run_path, [Engine(0, f"http://127.0.0.1:{port}")])
    engine = python_module(
        "tools.scripted_endpoint", "--model", str(args.model), "--port", str(port), "--base-ms",
        str(1e3 / args.tokens_per_s), "--median", str(args.median), "--longest", "600", "--sigma", "0.6",
        "--interval", str(args.interval),
    )  # fmt: skip
    own = [*sys.argv[1:], "--folder", str(args.folder)]
    parts = [
        Part("engine", engine, args.folder / "engine.log"),
        *(Part(role, python_module("tools.benchmark_rollout", *own, "--role", role), args.folder / f"{role}.log")
          for role in ("trainer", "rollout")),
    ]  # fmt: skip
    with supervised(parts):
        for part in parts:
            part.start()
        limit = time.monotonic() + 10 * args.seconds + 300
        while parts[-1].poll() is None:
            if time.monotonic() > limit:
                raise TimeoutError("the rollout did not end")
            for part in parts[:-1]:
                if part.poll() is not None:
                    raise part.failure()
            time.sleep(0.5)
        if parts[-1].poll():
            raise parts[-1].failure()
    found: dict[str, Any] = json.loads((args.folder / "found.json").read_text())
    return found


async def roll_out(args: argparse.Namespace) -> int:
    """The rollout process, with a stop watch beside it."""
    from megatron_async.rollout import process as rollout

    config, process = configuration(args), psutil.Process()
    running = asyncio.create_task(rollout.run(config))
    before, status = 0, config.run_path / "status" / "rollout.json"
    while (now := counters(status)).get("running", 0) < 0.95 * args.agents:
        before = process.memory_info().rss if not now.get("running") else before
        if running.done():
            return running.result()
        await asyncio.sleep(0.2)
    await asyncio.sleep(2 * args.flush_s)
    lags: list[float] = []
    collections = Collections()
    began, tokens, cpu = time.monotonic(), counters(status)["generated_tokens"], process.cpu_times()
    while time.monotonic() < began + args.seconds:
        asked = time.monotonic()
        await asyncio.sleep(LAG_S)
        lags.append(time.monotonic() - asked - LAG_S)
    seconds, after, used = time.monotonic() - began, counters(status), process.cpu_times()
    found = {
        "lag_p50_ms": float(np.percentile(lags, 50)) * 1e3,
        "lag_p99_ms": float(np.percentile(lags, 99)) * 1e3,
        "lag_max_ms": max(lags) * 1e3,
        "memory_per_agent_kib": (process.memory_info().rss - before) / args.agents / 1024,
        "memory_mib": process.memory_info().rss / 2**20,
        "tokens_per_s": (after["generated_tokens"] - tokens) / seconds,
        "cpu_share": (used.user + used.system - cpu.user - cpu.system) / seconds,
        "longest_collection_ms": collections.longest_s * 1e3,
        "agents_running": after["running"],
        "written_down_tokens": after["written_down_tokens"],
    }
    (args.folder / "found.json").write_text(json.dumps(found))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return 0


class Collections:
    """How much processor time garbage collections take, which stop the event loop."""

    def __init__(self) -> None:
        self.longest_s = self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.longest_s = max(self.longest_s, time.thread_time() - self._began)


def counters(status: Path) -> dict[str, float]:
    if not status.exists():
        return {}
    read: dict[str, float] = json.loads(status.read_text())["counters"]
    return read


def take_batches(args: argparse.Namespace) -> int:
    """Takes every batch out of the bank, as a trainer does, until it is stopped."""
    config, step = configuration(args), 0
    with Bank.open(config.bank_url) as bank:
        while True:
            if bank.take_batch(step, GROUPS, GROUP_SIZE, 0):
                bank.commit_step(step, 0, 0)
                step += 1
            else:
                time.sleep(config.rollout.poll_s / 2)


def rows(found: dict[str, Any], args: argparse.Namespace) -> list[Row]:
    conditions = (
        f"{args.agents} desk agents in one process, scripted engine on the same machine, {args.tokens_per_s:g} "
        f"tokens/s for each agent, an event per {args.interval} tokens, {args.median:g} tokens a turn (median), "
        f"flush every {args.flush_s:g} s, SQLite; {args.seconds:g} s; {found['tokens_per_s']:.0f} tokens/s arrived, "
        f"{found['cpu_share']:.2f} of a core used; median lag {found['lag_p50_ms']:.1f} ms, longest "
        f"{found['lag_max_ms']:.0f} ms"
    )
    return [
        Row("loop_lag_p99_ms", round(found["lag_p99_ms"], 1), "ms", "<= 50", conditions),
        Row("memory_per_agent_kib", round(found["memory_per_agent_kib"], 1), "KiB", "", conditions),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
