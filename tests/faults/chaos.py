"""Many faults over many runs, with real trainer ranks: `python -m tests.faults.chaos --out runs/chaos --kills 200`.

Each run is hit again and again while it trains (see `chaos_run`). Rows are appended to OUT/rows.jsonl as runs end, so
the command can be stopped and started again; `--write` makes docs/benchmarks/faults.json and its table from them.

Flavours of a run, in turns:
  sqlite      bank and run folder on a small tmpfs that is filled up; needs the right to mount (else no full disk)
  postgresql  bank on a server of its own whose connections are cut; needs PostgreSQL
  sglang      `launch` itself with real SGLang servers instead of scripted engines, which are slow to start
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_async.observe.rows import RowWriter
from tests.faults.chaos_run import Plan, Run, scripted, write_config
from tests.postgresql_server import PostgreSQLServer, why_unavailable
from tools.benchmark_rows import FOLDER, ROOT, Row, write_rows

COMMON = ("rank", "rank", "torchrun", "rollout", "rollout", "engine", "launcher", "pause")
WITHOUT_RANKS = ("stand_in", "stand_in", "rollout", "rollout", "engine", "engine", "launcher", "pause")
LIVE = ("rank", "rank", "torchrun", "rollout", "rollout", "server", "launcher", "pause")
KINDS = {
    "rank": "a trainer rank killed",
    "torchrun": "torchrun killed",
    "stand_in": "the stand-in for the trainer killed",
    "rollout": "rollout killed",
    "engine": "a scripted engine killed",
    "server": "an SGLang server's process killed",
    "launcher": "the launcher killed, the run resumed",
    "pause": "a process stopped (SIGSTOP) for up to 3 s",
    "database": "every connection of the database cut",
    "full_disk": "the disk full for up to 2 s",
}
COMMAND = "python -m tests.faults.chaos --out runs/chaos --kills 200 --write"
HEADS = (
    "run", "flavour", "trainer", "faults", "steps", "updates", "finished",
    "stale", "lost", "doubled", "hangs", "orphans", "largest gap", "bound",
    "episodes continued", "begun anew", "median recovery (s)",
)  # fmt: skip


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run under fire is ended too
    args.out.mkdir(parents=True, exist_ok=True)
    rows = args.out / "rows.jsonl"
    model = args.model or make_model(args.out / "model")
    while sum(row["kills"] for row in read(rows)) < args.kills:
        number = len(read(rows))
        flavour = args.flavours[number % len(args.flavours)]
        row = {"run": number, "flavour": flavour, **play(args, model, flavour, number)}
        with RowWriter(rows) as writer:
            writer.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "recovery_s"}), flush=True)
    if args.write:
        write(read(rows))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and the runs' folders")
    parser.add_argument("--kills", type=int, default=200, help="faults in all, those of earlier calls included")
    parser.add_argument("--kills-per-run", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="of a run")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of the trainer, in turns")
    parser.add_argument("--servers", type=int, default=2, help="SGLang servers of a run called sglang")
    parser.add_argument("--model", type=Path, help="checkpoint to start from; default: a tiny one is made")
    flavours = ("sqlite", "postgresql", "sglang")
    parser.add_argument("--flavours", nargs="+", choices=flavours, default=list(flavours[:2]))
    parser.add_argument(
        "--stand-in", action="store_true",
        help="a trainer without a model: many more faults in the same time, everything but the trainer's own checked",
    )  # fmt: skip
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/faults.json from all rows")
    return parser.parse_args()


def make_model(path: Path) -> Path:
    if not path.exists():
        command = [sys.executable, str(ROOT / "tools/make_tiny_checkpoint.py"), "--out", str(path), "--seed", "0"]
        subprocess.run(command, check=True, cwd=ROOT)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def play(args: argparse.Namespace, model: Path, flavour: str, number: int) -> dict[str, Any]:
    """One run of a flavour; its folder is removed unless something was wrong."""
    folder = args.out / f"run_{number}"
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder)) if flavour == "sqlite" else None
        database = stack.enter_context(server()) if flavour == "postgresql" else None
        ranks = args.ranks[number // len(args.flavours) % len(args.ranks)]
        changes: dict[str, Any] = {"steps": args.steps, "layout": {"world_size": ranks}}
        if database is not None:
            changes["bank"] = {"url": database.new_database()}
        if flavour == "sglang":
            changes |= {
                "engines": {"count": args.servers, "mem_fraction_static": 0.1, "max_total_tokens": 32768},
                "publish": {"transport": "distributed", "deadline_s": 60},
            }
        config = write_config(folder, model, **changes)
        extra = (["full_disk"] if disk else []) + (["database"] * 2 if database else [])
        launch = (sys.executable, "-m", "megatron_async", "launch", "--resume", "--config")
        live = flavour == "sglang"
        kinds = LIVE if live else WITHOUT_RANKS if args.stand_in else COMMON
        plan = Plan(
            kinds=(*kinds, *extra), argv=launch if live else scripted(args.stand_in),
            hits=args.kills_per_run, seed=1000 + number,
        )  # fmt: skip
        row = {"trainer": "stand-in" if args.stand_in else f"{ranks} ranks" if ranks > 1 else "1 rank"}
        row |= Run(config, plan, disk=disk, database=database).play().row()
        good = not any(row[key] for key in ("lost", "doubled", "hangs", "orphans", "problems"))
        if not good:
            shutil.copytree(folder, args.out / f"kept_{number}", dirs_exist_ok=True, ignore_dangling_symlinks=True)
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    return row


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A tmpfs of its own at `folder`; None where mounting is not allowed."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, check=False).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def server() -> Iterator[PostgreSQLServer]:
    reason = why_unavailable()
    if reason:
        raise SystemExit(f"flavour postgresql: {reason}")
    made = PostgreSQLServer()
    try:
        yield made
    finally:
        made.stop()


# ---------------------------------------------------------------------- the table


def write(rows: list[dict[str, Any]]) -> None:
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds.update(row["by_kind"])
    def tally(key: str) -> str:
        return ", ".join(f"{count} {value}" for value, count in Counter(row[key] for row in rows).most_common())

    conditions = (
        f"{len(rows)} runs by bank or engine ({tally('flavour')}) and by trainer ({tally('trainer')}), "
        f"{sum(row['steps'] for row in rows)} steps, {sum(row['updates'] for row in rows)} policy updates, "
        f"{sum(row['finished'] for row in rows)} finished trajectories; desk episodes; live SGLang servers in runs "
        f"called sglang, scripted engines in the others; "
        f"{', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}"
    )
    gap = max(row["max_gap"] - row["bound"] for row in rows)
    write_rows(
        "faults",
        [
            Row("kills", sum(kinds.values()), "", ">= 200", conditions, COMMAND),
            Row("lost", sum(len(row["lost"]) for row in rows), "trajectories", "<= 0", conditions, COMMAND),
            Row("doubled", sum(len(row["doubled"]) for row in rows), "trajectories", "<= 0", conditions, COMMAND),
            Row("hangs", sum(row["hangs"] for row in rows), "runs", "<= 0", conditions, COMMAND),
            Row("orphans", sum(len(row["orphans"]) for row in rows), "processes", "<= 0", conditions, COMMAND),
            Row("gap_over_bound", gap, "versions", "<= 0", conditions, COMMAND),
            Row("other_problems", sum(len(row["problems"]) for row in rows), "", "<= 0", conditions, COMMAND),
        ],
    )
    (FOLDER / "faults.md").write_text(table(rows, kinds))
    write_rows("faults", [])


def table(rows: list[dict[str, Any]], kinds: Counter[str]) -> str:
    """What was hit, and what each run came to."""
    lines = ["", "| fault | times |", "|---|---|"]
    lines += [f"| {KINDS[kind]} | {count} |" for kind, count in kinds.most_common()]
    lines += ["", "| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for row in rows:
        recovery = sorted(row["recovery_s"])[len(row["recovery_s"]) // 2] if row["recovery_s"] else "–"
        cells = [
            row["run"], row["flavour"], row["trainer"], row["kills"], row["steps"], row["updates"], row["finished"],
            row["stale"], len(row["lost"]), len(row["doubled"]), row["hangs"], len(row["orphans"]), row["max_gap"],
            row["bound"], row["continued"], row["restarted"], recovery,
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    notes = (
        "Every finished trajectory that was ever seen is looked for, and read, at the end of its run; a trajectory is "
        "doubled when it was seen in two committed steps. Stale: had finished, and was set aside by the staleness "
        "bound (an episode that a fault held up while others overtook it). Recovery: from a fault to the next trained "
        "step."
    )
    return "\n".join(["", notes, *lines]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
