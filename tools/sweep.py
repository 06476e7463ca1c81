"""Runs configurations x seeds of the main job, resumably, and shows how they compare.

    python -m tools.sweep recipes/sweeps/methods_lag4.yaml --dry-run       # what would run
    python -m tools.sweep recipes/sweeps/methods_lag4.yaml --minutes 55    # goes on where it stopped
    python -m tools.sweep recipes/sweeps/methods_lag4.yaml --report --publish

Every run is `launch` as a user would start it, from one warm start per seed. A finished run adds one row to
runs/sweeps/NAME/rows.jsonl and is never run again under the same configuration; a failed one is recorded with its
reason and run again with --retry-failed; one that was interrupted starts afresh. Ctrl-C is safe at any time.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_async.config import RunConfig, check
from megatron_async.errors import EXIT_STOPPED, EXIT_USER_ERROR, UserError
from megatron_async.observe import RunFiles
from megatron_async.observe.rows import RowWriter, read_rows
from tools import sweep_report
from tools.sweep_measures import measure
from tools.sweep_plan import MADE_HERE, Run, Sweep, plan, read_sweep

EXIT_OK, EXIT_FAILURES = 0, 1

logger = logging.getLogger("sweep")


@dataclass(frozen=True, slots=True)
class Results:
    """The rows of a sweep's folder: what finished, and what failed and why. The latest row of a run counts."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "rows.jsonl"

    def latest(self) -> dict[str, dict[str, Any]]:
        """identity -> its latest row."""
        return {row["identity"]: row for row in read_rows(self.path)}

    def add(self, run: Run, status: str, seconds: float, more: dict[str, Any]) -> None:
        with RowWriter(self.path) as rows:
            rows.append({
                "identity": run.identity, "values": dict(run.values), "seed": run.seed, "status": status,
                "folder": str(run.config.run_path), "seconds": seconds, "time": time.time(), **more,
            })  # fmt: skip

    def pending(self, runs: Sequence[Run], *, retry_failed: bool) -> list[Run]:
        """Runs still to be made, in order."""
        known = self.latest()
        return [
            run
            for run in runs
            if run.identity not in known or (retry_failed and known[run.identity]["status"] == "failed")
        ]


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Two processes must not work on one sweep; the lock ends with the process. Raises UserError when it is held."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process works on {folder}; wait for it, or give --folder") from None
        yield


class Runner:
    """Makes the pending runs one after another.

    minutes: no run is started that is not expected to end within them (the mean of those so far); None: no limit.
    max_failures: so many failures in a row end the sweep.
    """

    def __init__(self, results: Results, minutes: float | None, max_failures: int) -> None:
        self._results = results
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._max_failures = max_failures

    def make(self, runs: Sequence[Run]) -> int:
        """Returns how many failed. Raises KeyboardInterrupt on Ctrl-C, UserError after `max_failures` in a row."""
        failed = in_a_row = 0
        for done, run in enumerate(runs):
            if not self._time_for(run):
                logger.info("%d of %d runs are left for another time", len(runs) - done, len(runs))
                break
            logger.info("run %d of %d: %s, seed %d", done + 1, len(runs), run.label, run.seed)
            if self._make_one(run):
                in_a_row = 0
                continue
            failed, in_a_row = failed + 1, in_a_row + 1
            if in_a_row >= self._max_failures:
                raise UserError(
                    f"{in_a_row} runs in a row failed; see {self._results.path} for the reasons, mend them, and go on "
                    "with --retry-failed"
                )
        return failed

    def _time_for(self, run: Run) -> bool:
        if self._deadline is None:
            return True
        finished = [row for row in self._results.latest().values() if row["status"] == "finished"]
        alike = [row["seconds"] for row in finished if row["values"] == dict(run.values)]
        seconds = alike or [row["seconds"] for row in finished]
        return time.monotonic() + (fmean(seconds) if seconds else 0.0) <= self._deadline

    def _make_one(self, run: Run) -> bool:
        config = run.config
        try:
            if run.warm_start is not None:
                config = started_from(config, warm_start(run.warm_start))
            began = time.monotonic()
            _launch(config)
            row = measure(config.run_path)
        except Exception as error:  # whatever ended one run must not end a night of them
            logger.exception("failed: %s, seed %d", run.label, run.seed)
            self._results.add(run, "failed", 0.0, {"reason": f"{type(error).__name__}: {error}"})
            return False
        self._results.add(run, "finished", time.monotonic() - began, row)
        return True


def started_from(config: RunConfig, checkpoint: Path) -> RunConfig:
    """`config` with its policy from `checkpoint`; raises ConfigError when the two do not fit."""
    config = replace(config, model=replace(config.model, path=str(checkpoint)))
    check(config)
    return config


def _launch(config: RunConfig) -> None:
    from megatron_async import launch

    if launch.run(config, fresh=True) == EXIT_STOPPED:
        raise KeyboardInterrupt


def warm_start(config: RunConfig) -> Path:
    """The checkpoint of a seed's warm start; made the first time. Returns its folder."""
    from megatron_async import launch
    from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint

    files = RunFiles(config.run_path)
    complete = files.root / "complete"
    if complete.is_file():
        return files.checkpoint
    if config.model.path == MADE_HERE:
        model = config.run_path.with_name(config.name + "-model")
        shutil.rmtree(model, ignore_errors=True)
        write_tiny_checkpoint(model, config.seed, TinyShape())
        config = replace(config, model=replace(config.model, path=str(model)))
    logger.info("warm start of seed %d", config.seed)
    if launch.sft(config, fresh=True) == EXIT_STOPPED:
        raise KeyboardInterrupt
    complete.touch()  # a kill before this line leaves half a checkpoint, which is made again
    return files.checkpoint


def show(runs: Sequence[Run], results: Results) -> str:
    """What would run, and what has."""
    known = results.latest()
    lines = []
    for run in runs:
        row = known.get(run.identity)
        state = "to run" if row is None else row["status"]
        reason = f": {row['reason'].splitlines()[0]}" if row and row["status"] == "failed" else ""
        lines.append(f"{state:9} seed {run.seed}  {run.label:30} {run.config.name}{reason}")
    counts = {
        state: sum(line.startswith(state) for line in lines) for state in ("finished", "failed", "to run")
    }
    return "\n".join([*lines, ", ".join(f"{count} {state}" for state, count in counts.items())])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", type=Path, help="YAML file, see recipes/sweeps and docs/sweeps.md")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
        help="override a key of the sweep file, e.g. --set seeds='[0]' --set set.steps=10",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where runs and rows go (default: runs/sweeps/NAME)")
    parser.add_argument(
        "--minutes", type=float, help="start no run that is not expected to end within this time"
    )
    parser.add_argument("--retry-failed", action="store_true", help="run those again that failed")
    parser.add_argument(
        "--max-failures", type=int, default=3, help="failures in a row that end all (%(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their state; start nothing")
    parser.add_argument("--report", action="store_true", help="only table and figures of what has finished")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="write the report also as docs/benchmarks/sweep_NAME.{json,md,png}",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, run, report; returns the exit code."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    try:
        return _main(options, read_sweep(options.sweep, options.overrides))
    except UserError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("sweep: stopped; the same command goes on", file=sys.stderr)
        return EXIT_STOPPED


def _main(options: argparse.Namespace, sweep: Sweep) -> int:
    folder = (options.folder or Path("runs") / "sweeps" / sweep.name).absolute()
    runs, results, failed = plan(sweep, folder), Results(folder), 0
    if options.dry_run:
        print(show(runs, results))
        return EXIT_OK
    if not options.report:
        with only_one(folder):
            pending = results.pending(runs, retry_failed=options.retry_failed)
            failed = Runner(results, options.minutes, options.max_failures).make(pending)
    finished = sweep_report.finished_rows(runs, results.latest())
    if finished:
        print(sweep_report.write(sweep, finished, folder, publish=options.publish))
    else:
        print("no run has finished yet")
    return EXIT_FAILURES if failed else EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
