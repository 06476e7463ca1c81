"""Runs killed with SIGKILL at random moments and resumed: [resume_identical_runs].

    python -m tests.faults.resume_runs --runs 20 --write

Every run trains on the same recorded batches, without engines. One is left alone; each of the others is killed at a
moment drawn evenly over the time that one took, from its start to its end, resumed, and compared with it bit by bit.
Trainers are forked from this process, so that a run is seconds and not the import of its libraries.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_async.bank import Bank
from megatron_async.training.checkpointing import list_generations
from tests.engine_reference import make_model
from tests.faults import trainer_worker
from tests.recorded_run import record_run
from tools.benchmark_rows import Row, write_rows

STEPS = 12
DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One killed run. committed: steps in the bank at the kill. complete: newest generation then. saving: whether a
    generation was being written. differing: tensors whose bits differ from the uninterrupted run's at the end."""

    committed: int
    complete: int
    saving: bool
    differing: int


def fork_trainer(config: Path) -> int:
    """Start a trainer on a run's configuration; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(config.parent / "logs" / "trainer.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["trainer_worker", str(config)]
        code = trainer_worker.main()
    finally:
        os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """Exit status within some seconds, or None."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    return None


def run_to_the_end(config: Path) -> dict[str, torch.Tensor]:
    """Final weights. Raises RuntimeError with the log's tail when the trainer fails or takes too long."""
    pid = fork_trainer(config)
    status = wait(pid, DEADLINE_S)
    if status != 0:
        if status is None:
            os.kill(pid, signal.SIGKILL)
        tail = (config.parent / "logs" / "trainer.log").read_text()[-2000:]
        raise RuntimeError(f"the trainer ended with status {status}:\n{tail}")
    return load_file(config.parent / "checkpoint" / "model.safetensors")


def killed_run(config: Path, after_s: float, expected: dict[str, torch.Tensor]) -> Outcome | float:
    """Kill after some seconds and resume; the seconds that the trainer took if it was faster."""
    started = time.monotonic()
    pid = fork_trainer(config)
    if wait(pid, after_s) is not None:
        return time.monotonic() - started
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    folder = config.parent / "checkpoints"
    saving = any(folder.glob(".step_*"))
    complete = max((generation.steps for generation in list_generations(folder)), default=0)
    with Bank.open(f"sqlite:///{config.parent / 'bank.sqlite'}") as bank:
        committed = sum(step.state == "committed" for step in bank.steps())
    weights = run_to_the_end(config)
    differing = sum(not torch.equal(weights[name], tensor) for name, tensor in expected.items())
    return Outcome(committed, complete, saving, differing)


def kill_runs(folder: Path, runs: int, seed: int) -> list[Outcome]:
    """So many killed runs against one that was left alone."""
    make_model("moe").save_pretrained(folder / "model")
    started = time.monotonic()
    expected = run_to_the_end(record_run(folder / "plain" / "run", folder / "model", STEPS))
    whole, dice, outcomes = time.monotonic() - started, random.Random(seed), []
    number = 0
    while len(outcomes) < runs:
        number += 1
        place = folder / str(number)
        config = record_run(place / "run", folder / "model", STEPS)
        outcome = killed_run(config, dice.uniform(0.0, whole), expected)
        shutil.rmtree(place)
        if isinstance(outcome, float):
            whole = outcome  # the machine is less loaded than it was
            continue
        outcomes.append(outcome)
        print(f"run {len(outcomes)}: {outcome}", flush=True)
    return outcomes


def main() -> int:
    """Run, print, and with --write keep the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/megatron.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = kill_runs(Path(temporary), options.runs, options.seed)
    identical = sum(outcome.differing == 0 for outcome in outcomes)
    steps = Counter(outcome.committed for outcome in outcomes)
    conditions = (
        f"of {len(outcomes)} runs; kill -9 at a random moment; {STEPS} steps on recorded batches, a generation every "
        f"3; steps committed at the kill: {', '.join(f'{step}: {count}x' for step, count in sorted(steps.items()))}; "
        f"{sum(outcome.saving for outcome in outcomes)} while a generation was being written; tiny Qwen3-MoE, float32, "
        "one rank; weights after the last step bit-identical to the uninterrupted run's"
    )
    print(f"resume_identical_runs: {identical} {conditions}")
    if options.write:
        write_rows("megatron", [Row("resume_identical_runs", identical, "runs", f">= {len(outcomes)}", conditions)])
    return 0 if identical == len(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
