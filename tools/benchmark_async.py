"""What asynchrony is worth: the same work synchronous, one step off, and fully asynchronous.

Work: desk episodes in the order of their prompts, with tools that take their time (log-normal), on a scripted engine
whose answers have a long tail of lengths (`tools.scripted_endpoint`): a length is a function of the prompt, so every
mode does the same. A mode that leaves its longest episodes unfinished at the end has done less: speeds are trained
action tokens per second. Rollout, admission and bank are the product's; the trainer is this process, its update a wait.

First the rollout alone, never held back, says how long generation takes at least; the update is then made --balance
times as long as generation, per step. The bound is the slower of both sides alone. A mode's speed-up is measured
against the synchronous one; `speedup_over_bound` is the asynchronous one's share of what the bound allows.

Batch and concurrency fit the bound on staleness: the longest episodes (four times the mean) last less than the four
steps that they may overlap, so that the bound need not hold the engine back for their sake.

Every step is printed as it ends. A mode that is not done after --deadline seconds, or whose rollout ends, ends the
command; its folder with the logs is then kept, and named.

    python -m tools.benchmark_async --model runs/tiny --write        # six minutes on two idle cores
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_async import config as configuration
from megatron_async.bank import Bank
from megatron_async.bank.requests import PHASE, TRAINING
from megatron_async.config.schema import (
    BatchConfig,
    CheckpointConfig,
    EnvironmentConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from megatron_async.observe.status import read_status
from megatron_async.rollout.environments.base import AssistantTurn, Split, Step, Task
from megatron_async.rollout.environments.desk import DeskEnvironment, DeskTasks
from megatron_async.roster import Engine, write_roster
from megatron_async.supervise import Part, python_module, supervised
from sglang_bridge.server import claim_port
from tools.benchmark_rows import FOLDER, Row, write_rows

BATCH, CONCURRENCY = BatchConfig(groups=16, group_size=4), 48
MODES = {"synchronous": 0, "one step off": 1, "asynchronous": 4}
ENGINE = {"base-ms": 5.0, "request-ms": 0.15, "median": 30, "sigma": 1.0, "longest": 400, "interval": 16}
"""Options of the scripted endpoint."""
_SAMPLE_S, _POLL_S = 0.25, 0.01


class SlowDesk(DeskEnvironment):
    """The desk, whose answers take a log-normal time that depends on the task and the turn alone."""

    def __init__(self, task: Any, name: str) -> None:
        super().__init__(task)
        self._dice = random.Random(name)

    async def step(self, turn: AssistantTurn) -> Step:
        await asyncio.sleep(0.1 * math.exp(self._dice.gauss(0, 1)))
        return await super().step(turn)


class SlowTasks(DeskTasks):
    def environment(self, task: Task) -> SlowDesk:
        return SlowDesk(super().environment(task).task, task.task_id)


def build(options: Mapping[str, Any], split: Split, seed: int) -> SlowTasks:
    """The environment of the runs: `environment.name: tools.benchmark_async:build`."""
    return SlowTasks(split, seed=seed)


@dataclass(slots=True)
class Measured:
    """seconds: from the first step's start of generation to the last step's end. tokens: action tokens of the batches.
    engine, trainer: share of that time they worked. samples: (seconds, engine's share) over time. updates: (begin, end)
    of each."""

    seconds: float = 0.0
    tokens: int = 0
    engine: float = 0.0
    trainer: float = 0.0
    samples: list[tuple[float, float]] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Action tokens per second."""
        return self.tokens / self.seconds


def main() -> int:
    args = arguments()
    alone = measure(args, "rollout alone", max_staleness=10 * args.steps, update_s=0.0)
    update_s = args.balance * alone.seconds / args.steps
    found = {mode: measure(args, mode, bound, update_s) for mode, bound in MODES.items()}
    bound = min(alone.rate, alone.tokens / (args.steps * update_s))
    say(f"bound {bound:.0f} tokens/s: the slower of rollout and updates for {told(alone)}")
    for row in (made := rows(found, alone, bound, update_s, args)):
        say(f"{row.figure}: {row.value}")
    draw(found, args.picture)
    say(f"timeline: {args.picture}")
    if args.write:
        draw(found, FOLDER / "async_timeline.png")
        write_rows("async", made)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--picture", type=Path, default=Path(tempfile.gettempdir()) / "async_timeline.png")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/async.json and the picture")
    return parser.parse_args()


def add_work(parser: argparse.ArgumentParser) -> None:
    """The options that `measure` reads, and --balance."""
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory with the desk's tokenizer")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--balance", type=float, default=0.8, help="seconds of an update per second of generation")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for one mode (%(default)s)")


def say(text: str) -> None:
    """To the terminal at once, also through a pipe: whoever waits sees how far it is."""
    print(text, flush=True)


def measure(
    args: argparse.Namespace, mode: str, max_staleness: int, update_s: float,
    batch: BatchConfig = BATCH,
) -> Measured:  # fmt: skip
    """One mode, in a folder of its own, which is kept when it fails. args: model, steps and deadline are read."""
    folder = Path(tempfile.mkdtemp(prefix="benchmark_async_"))
    say(f"{mode}: {args.steps} steps, updates of {update_s:.2f} s, at most {args.deadline:g} s in all")
    try:
        measured = run(args, mode, configuration_of(args, folder, max_staleness, batch), update_s)
    except BaseException:
        say(f"{mode}: not done; bank, status and logs are in {folder}")
        raise
    shutil.rmtree(folder)
    say(f"{mode}: {measured.seconds:.1f} s, engine {measured.engine:.0%}, trainer {measured.trainer:.0%}")
    return measured


def configuration_of(args: argparse.Namespace, folder: Path, max_staleness: int, batch: BatchConfig) -> RunConfig:
    return RunConfig(
        name="run", run_dir=str(folder), model=ModelConfig(path=str(args.model)), steps=args.steps,
        batch=batch,
        rollout=RolloutConfig(
            max_staleness=max_staleness, concurrency=CONCURRENCY, max_turns=4, max_new_tokens=400, max_tokens=4096,
            poll_s=2 * _POLL_S,
        ),
        environment=EnvironmentConfig(name="tools.benchmark_async:build"),
        checkpoint=CheckpointConfig(every=0),
    )  # fmt: skip


def run(args: argparse.Namespace, mode: str, config: RunConfig, update_s: float) -> Measured:
    """Start engine and rollout, and train."""
    root = config.run_path
    root.mkdir(parents=True)
    configuration.save(config, root / "config.yaml")
    port = claim_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    write_roster(root, [Engine(0, url)])
    options = [f"--{name}={value}" for name, value in ENGINE.items()]
    engine = python_module("tools.scripted_endpoint", "--model", str(args.model), "--port", str(port), *options)
    rollout = python_module("megatron_async", "rollout", "--config", str(root / "config.yaml"))
    parts = [Part("engine", engine, root / "engine.log"), Part("rollout", rollout, root / "rollout.log")]
    with supervised(parts), Bank.open(config.bank_url) as bank:
        bank.set_state(PHASE, TRAINING)
        parts[0].start()
        ask(url, "/server_info", wait=True)
        parts[1].start()
        return train(config, bank, url, update_s, Watch(mode, config, parts, args.deadline))


class Watch:
    """Ends a mode that does not go on: `check` raises when one of `parts` ended or `deadline_s` is over."""

    def __init__(self, mode: str, config: RunConfig, parts: list[Part], deadline_s: float) -> None:
        self._mode, self._config, self._parts, self._deadline_s = mode, config, parts, deadline_s
        self._limit = time.monotonic() + deadline_s

    def check(self, bank: Bank, step: int) -> None:
        for part in self._parts:
            if part.poll() is not None:
                raise part.failure()
        if time.monotonic() < self._limit:
            return
        batch, status = self._config.batch, read_status(self._config.run_path).get("rollout")
        rollout = "has said nothing yet"
        if status is not None:
            rollout = f"is {status.phase}, waits for {status.waiting_for or '-'}"
        raise TimeoutError(
            f"{self._mode}: {step} of {self._config.steps} steps after {self._deadline_s:g} s (--deadline); "
            f"{bank.peek_ready(batch.group_size)} of {batch.groups} groups wait, trajectories {bank.counts()}; the "
            f"rollout {rollout}. On a busy machine raise --deadline or lower --steps"
        )


def train(config: RunConfig, bank: Bank, url: str, update_s: float, watch: Watch) -> Measured:
    """The trainer's side; time begins with the engine's first request."""
    measured, over = Measured(), threading.Event()
    while not ask(url, "/server_info")["tokens"]:
        watch.check(bank, 0)
        time.sleep(_POLL_S)
    began, version = time.monotonic(), 0
    sampler = threading.Thread(target=sample, args=(url, began, measured, over), daemon=True)
    sampler.start()
    for step in range(config.steps):
        oldest = version - config.rollout.max_staleness
        while not (batch := bank.take_batch(step, config.batch.groups, config.batch.group_size, oldest)):
            watch.check(bank, step)
            time.sleep(_POLL_S)
        started = time.monotonic()
        measured.tokens += sum(trajectory.num_action_tokens for trajectory in batch)
        time.sleep(update_s)
        measured.updates.append((started - began, time.monotonic() - began))
        if update_s:  # alone, nothing is published: nothing holds the rollout back
            bank.record_version(version + 1, version, step)
            ask(url, "/update_weight_version", {"new_version": str(version + 1), "abort_all_requests": False})
        bank.commit_step(step, version, version + bool(update_s))
        version += bool(update_s)
        say(f"  step {step + 1}/{config.steps}: batch after {started - began:.1f} s, done after {_since(began):.1f} s")
    measured.seconds = _since(began)
    busy = ask(url, "/server_info")["busy_s"]
    over.set()
    sampler.join()
    bank.set_state(PHASE, "finished")
    measured.engine = min(1.0, busy / measured.seconds)
    measured.trainer = sum(end - start for start, end in measured.updates) / measured.seconds
    return measured


def _since(began: float) -> float:
    return time.monotonic() - began


def sample(url: str, began: float, measured: Measured, over: threading.Event) -> None:
    """The engine's share of every quarter of a second."""
    before, last = 0.0, 0.0
    while not over.wait(_SAMPLE_S):
        now, busy = time.monotonic() - began, ask(url, "/server_info")["busy_s"]
        measured.samples.append((now, min(1.0, (busy - before) / (now - last))))
        before, last = busy, now


def ask(url: str, path: str, body: Mapping[str, Any] | None = None, *, wait: bool = False) -> dict[str, Any]:
    limit = time.monotonic() + (60 if wait else 0)
    data = None if body is None else json.dumps(body).encode()
    while True:
        try:
            with urllib.request.urlopen(url + path, data, timeout=10) as response:
                answer: dict[str, Any] = json.loads(response.read())
                return answer
        except OSError:
            if time.monotonic() > limit:
                raise
        time.sleep(0.05)


def rows(
    found: Mapping[str, Measured], alone: Measured, bound: float, update_s: float, args: argparse.Namespace
) -> list[Row]:
    conditions = (
        f"{args.steps} steps of {BATCH.groups} groups of {BATCH.group_size}, {CONCURRENCY} episodes at once, staleness "
        f"at most {', '.join(map(str, MODES.values()))}; {setting()}, updates of {update_s:.2f} s that wait; "
        f"generation alone {told(alone)}, updates alone {args.steps * update_s:.1f} s; "
        + ", ".join(f"{mode} {told(value)}" for mode, value in found.items())
        + "; speeds are tokens per second"
    )
    synchronous = found["synchronous"].rate
    speed = {mode: value.rate / synchronous for mode, value in found.items()}
    return [
        Row("speedup_one_step_off", round(speed["one step off"], 2), "", "", conditions),
        Row("speedup_asynchronous", round(speed["asynchronous"], 2), "", "", conditions),
        Row("speedup_bound", round(bound / synchronous, 2), "", "", conditions),
        Row("speedup_over_bound", round(found["asynchronous"].rate / bound, 3), "", ">= 0.9", conditions),
        Row("engine_utilisation", [round(value.engine, 3) for value in found.values()], "", "", conditions),
        Row("trainer_utilisation", [round(value.trainer, 3) for value in found.values()], "", "", conditions),
    ]


def setting() -> str:
    """Environment and engine in words."""
    return (
        f"desk with slow tools, scripted engine ({ENGINE['base-ms']:g} ms and {ENGINE['request-ms']:g} ms per request "
        f"for a decoding step; turns of {ENGINE['median']:g} tokens in the median, sigma {ENGINE['sigma']:g}, up to "
        f"{ENGINE['longest']:g})"
    )


def told(value: Measured) -> str:
    """Seconds and tokens of a mode in words."""
    return f"{value.seconds:.1f} s ({value.tokens / 1000:.1f} k action tokens)"


def draw(found: Mapping[str, Measured], path: Path) -> None:
    """A strip per mode over the same time: the engine's share of each moment, and the updates below it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    longest = max(value.seconds for value in found.values())
    figure, strips = pyplot.subplots(len(found), 1, figsize=(11, 1.9 * len(found)), sharex=True)
    for axes, (mode, value) in zip(strips, found.items(), strict=True):
        axes.fill_between([t for t, _ in value.samples], [s for _, s in value.samples], step="pre", alpha=0.6)
        axes.broken_barh([(a, b - a) for a, b in value.updates], (-0.6, 0.5), color="tab:orange")
        axes.axvline(value.seconds, color="black", linewidth=1)
        axes.set_xlim(0, longest * 1.02)
        axes.set_ylim(-0.7, 1.05)
        axes.set_yticks([-0.35, 0.5], ["trainer", "engine"])
        axes.set_title(
            f"{mode}: {value.seconds:.1f} s, engine {value.engine:.0%}, trainer {value.trainer:.0%}", fontsize=10
        )
    strips[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
