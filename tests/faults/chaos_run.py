"""One run under fire: it is launched, hit again and again, resumed when its launcher dies, and judged at its end.

A hit is followed by the next one when the run has trained a further step, or sometimes at once, while it recovers. A
run that trains no step for `patience_s` hangs.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from megatron_async.bank import Bank
from megatron_async.config import load
from megatron_async.observe import read_metrics
from megatron_async.supervise import log_tail
from tests.faults import marked_desk
from tests.faults.chaos_watch import Findings, Watch, steps_are_whole
from tests.postgresql_server import PostgreSQLServer
from tools.benchmark_rows import ROOT

MARK = "MEGATRON_ASYNC_CHAOS"
"""In the environment of everything a run starts: what still has it after the end is an orphan."""

_LAST_BREATH_S = 15.0
_LAUNCHES_IN_VAIN = 3
_FEWEST_UPDATES = 0.8
"""Share of steps that must have updated the policy: a step whose rewards are all alike makes no version."""
_AT_ONCE = 0.3
"""Share of hits that fall while the run still recovers from the one before."""

# A part's processes by what stands in their command line, and what must not.
PARTS: dict[str, tuple[str, str]] = {
    "rank": (" -m megatron_async train ", "torch.distributed.run"),
    "torchrun": ("torch.distributed.run", "!"),
    "stand_in": ("chaos_trainer", "!"),
    "rollout": ("megatron_async rollout", "!"),
    "engine": ("scripted_endpoint", "!"),
    "server": ("sglang_bridge.serve", "!"),
    "scheduler": ("sglang::scheduler", "!"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """kinds: faults to draw from (names of `Run.faults`), in equal shares, or one after another. argv: the command, the
    configuration's path appended. hits: how many, then the run is left to end."""

    kinds: tuple[str, ...]
    argv: tuple[str, ...]
    hits: int
    seed: int
    in_turn: bool = False
    patience_s: float = 900.0
    calm_s: tuple[float, float] = (0.0, 1.5)


@dataclass(slots=True)
class Verdict:
    """What a run's fire did. hits: by kind. updates: policy updates that the last lineage holds. problems:
    whatever else is wrong at the end."""

    hits: Counter[str]
    findings: Findings
    steps: int
    hangs: int = 0
    orphans: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    updates: int = 0
    max_gap: int = 0
    bound: int = 0
    seconds: float = 0.0
    recovery_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As JSON."""
        found = self.findings
        return {
            "kills": sum(self.hits.values()), "by_kind": dict(sorted(self.hits.items())), "steps": self.steps,
            "updates": self.updates, "finished": found.finished, "trained": found.trained,
            "lost": found.lost, "doubled": found.doubled,
            "hangs": self.hangs, "orphans": self.orphans, "problems": self.problems, "max_gap": self.max_gap,
            "bound": self.bound, "stale": found.stale, "filtered": found.filtered, "continued": found.continued,
            "restarted": found.restarted, "seconds": round(self.seconds, 1),
            "recovery_s": [round(value, 1) for value in self.recovery_s],
        }  # fmt: skip


class Run:
    """config: path of a configuration. disk: a small file system that holds the run, for `full_disk`. database: the
    server of its bank, for `database`."""

    def __init__(
        self, config: Path, plan: Plan, *, disk: Path | None = None, database: PostgreSQLServer | None = None
    ) -> None:
        self.config = load(config, [])
        self._path, self._plan, self._disk, self._database = config, plan, disk, database
        self._mark = uuid.uuid4().hex
        self._dice = random.Random(plan.seed)
        self._log = config.parent / "launch.log"
        self._job: subprocess.Popen[bytes] | None = None
        self._committed_at_launch = self._in_vain = 0
        self._hits: Counter[str] = Counter()
        self.faults: dict[str, Callable[[], bool]] = {
            "rank": lambda: self._kill("rank"),
            "torchrun": lambda: self._kill("torchrun"),
            "stand_in": lambda: self._kill("stand_in"),
            "rollout": lambda: self._kill("rollout"),
            "engine": lambda: self._kill("engine"),
            "server": lambda: self._kill("server", "scheduler"),
            "launcher": self._kill_launcher,
            "pause": self._pause,
            "database": self._cut_database,
            "full_disk": self._fill_disk,
        }

    def play(self) -> Verdict:
        """Launch, hit, wait for the end, judge. Nothing of the run is alive afterwards."""
        began = time.monotonic()
        watch = Watch(self.config.bank_url)
        self._launch()
        watch.start()
        recoveries: list[float] = []
        try:
            hung = not self._under_fire(watch, recoveries)
            orphans = self._orphans()
        finally:
            self._end_all()
        findings = watch.stop()
        verdict = Verdict(self._hits, findings, watch.committed, int(hung), orphans, recovery_s=recoveries)
        verdict.seconds = time.monotonic() - began
        self._judge(verdict)
        return verdict

    # ------------------------------------------------------------------ the fire

    def _under_fire(self, watch: Watch, recoveries: list[float]) -> bool:
        """True when the run came to its end; False when it hung."""
        hit_at, seen, again = None, 0, False
        while True:
            assert self._job is not None
            if self._job.poll() is not None and not self._after_end(watch):
                return True
            if time.monotonic() - watch.last_news > self._plan.patience_s:
                self._note(f"no step for {self._plan.patience_s:g} s at step {watch.committed}")
                return False
            if hit_at is not None and watch.committed > seen:
                recoveries.append(time.monotonic() - hit_at)
                hit_at = None
            wanted = sum(self._hits.values()) < self._plan.hits and watch.committed > 0
            if wanted and (hit_at is None or again):
                time.sleep(self._dice.uniform(*self._plan.calm_s))
                if self._hit():
                    seen, hit_at, again = watch.committed, time.monotonic(), self._dice.random() < _AT_ONCE
            time.sleep(0.05)

    def _after_end(self, watch: Watch) -> bool:
        """The launcher has ended: by itself at the end of the run (False), or it is started again (True)."""
        assert self._job is not None
        if self._job.returncode == 0:
            return False
        in_vain = watch.committed == self._committed_at_launch and self._job.returncode != -signal.SIGKILL
        self._in_vain = self._in_vain + 1 if in_vain else 0
        if self._in_vain == _LAUNCHES_IN_VAIN:
            raise RuntimeError(f"the launcher keeps ending without a step; {self._log} ends:\n{log_tail(self._log)}")
        self._note(f"the launcher ended with {self._job.returncode} at step {watch.committed}")
        left = self._wait_gone()
        if left:
            self._note(f"left behind by a launcher: {left}")
        self._committed_at_launch = watch.committed
        self._launch()
        watch.last_news = time.monotonic()
        return True

    def _hit(self) -> bool:
        kinds, number = self._plan.kinds, sum(self._hits.values())
        kind = kinds[number % len(kinds)] if self._plan.in_turn else self._dice.choice(kinds)
        if not self.faults[kind]():
            return False
        self._hits[kind] += 1
        self._note(f"hit {sum(self._hits.values())}: {kind}")
        return True

    def _kill(self, *parts: str) -> bool:
        found = [process for part in parts for process in self._processes(part)]
        if not found:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            self._dice.choice(found).kill()
            return True
        return False

    def _kill_launcher(self) -> bool:
        assert self._job is not None
        if self._job.poll() is not None:
            return False
        self._job.kill()
        self._job.wait()
        return True

    def _pause(self) -> bool:
        found = [process for part in ("rank", "stand_in", "rollout", "engine") for process in self._processes(part)]
        if not found:
            return False
        victim = self._dice.choice(found)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.suspend()
            time.sleep(self._dice.uniform(0.3, 3.0))
            victim.resume()
            return True
        return False

    def _cut_database(self) -> bool:
        assert self._database is not None, "the kind database needs a PostgreSQL server"
        self._database.cut_connections()
        return True

    def _fill_disk(self) -> bool:
        assert self._disk is not None, "the kind full_disk needs a small file system"
        ballast = self._disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**20))
        time.sleep(self._dice.uniform(0.5, 2.0))
        ballast.unlink()
        return True

    # ------------------------------------------------------------------ processes

    def _launch(self) -> None:
        environment = {**os.environ, MARK: self._mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        argv = [*self._plan.argv, str(self._path)]
        with self._log.open("ab") as log:
            self._job = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def _processes(self, part: str) -> list[psutil.Process]:
        wanted, unwanted = PARTS[part]
        return [process for process, line in self._alive() if wanted in line and unwanted not in line]

    def _alive(self) -> Iterator[tuple[psutil.Process, str]]:
        """Everything of this run but the launcher, with command lines."""
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
                if ours and (self._job is None or process.pid != self._job.pid):
                    yield process, " ".join(process.cmdline()) + " "
            except psutil.Error:
                continue

    def _wait_gone(self) -> list[str]:
        limit = time.monotonic() + _LAST_BREATH_S
        while (left := [line[:100] for _, line in self._alive()]) and time.monotonic() < limit:
            time.sleep(0.1)
        return left

    def _orphans(self) -> list[str]:
        return self._wait_gone() if self._job is not None and self._job.poll() is not None else []

    def _end_all(self) -> None:
        for process, _ in list(self._alive()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._job is not None and self._job.poll() is None:
            self._job.kill()
            self._job.wait()

    def _note(self, text: str) -> None:
        with self._log.open("a") as log:
            log.write(f"==== {time.strftime('%H:%M:%S')} {text}\n")

    # ------------------------------------------------------------------ the verdict

    def _judge(self, verdict: Verdict) -> None:
        config = self.config
        verdict.bound = config.rollout.max_staleness
        with Bank.open(config.bank_url) as bank:
            if not verdict.hangs and not steps_are_whole(bank, config.steps, config.batch.trajectories):
                verdict.problems.append(f"steps: {[(s.step, s.state, s.trajectories) for s in bank.steps()]}")
            gaps = [step.metrics.get("version_gap/max", 0) for step in bank.steps()]
            verdict.updates = sum(step.version_after != step.version_before for step in bank.steps())
        if verdict.updates < _FEWEST_UPDATES * config.steps:
            verdict.problems.append(f"{verdict.updates} of {config.steps} steps updated the policy")
        rows = read_metrics(config.run_path)
        verdict.max_gap = int(max([*gaps, *(row.get("version_gap/max", 0) for row in rows)], default=0))
        if verdict.max_gap > verdict.bound:
            verdict.problems.append(f"a token was {verdict.max_gap} versions old, the bound is {verdict.bound}")
        if rows and not verdict.hangs and [row["step"] for row in rows] != list(range(config.steps)):
            verdict.problems.append(f"metrics of steps {[row['step'] for row in rows]}")


def write_config(folder: Path, model: Path, **changes: Any) -> Path:
    """A small desk run; `changes` replace sections."""
    config: dict[str, Any] = {
        "name": "run",
        "run_dir": str(folder),
        "steps": 8,
        "model": {"path": str(model), "dtype": "float32"},
        "trainer": {"deadline_s": 130, "max_restarts": 1000, "micro_batch_tokens": 2048},
        "optimizer": {"lr": 1e-4},
        "environment": {"name": marked_desk.NAME},
        "batch": {"groups": 2, "group_size": 2},
        # What scripted engines report are no policy's log-probs: nothing is masked for it, nothing dropped.
        "objective": {"mask_low": 0.0, "mask_high": float("inf")},
        "advantage": {"drop_zero_variance_groups": False},
        "rollout": {
            "max_staleness": 2, "concurrency": 12, "max_turns": 4, "max_new_tokens": 64, "max_tokens": 1024,
            "poll_s": 0.05, "flush_s": 0.2, "turn_deadline_s": 60, "trajectory_deadline_s": 120,
        },
        "engines": {"count": 2},
        "publish": {"transport": "disk", "verify": "off", "deadline_s": 20},
        "checkpoint": {"every": 2},
        "evaluation": {"tasks": 4},
        "observe": {"progress": "off", "tensorboard": False},
        **changes,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def scripted(stand_in: bool) -> tuple[str, ...]:
    """The command that launches a run on scripted engines."""
    return (sys.executable, "-m", "tests.faults.chaos_launch", *(("--stand-in",) if stand_in else ()))
