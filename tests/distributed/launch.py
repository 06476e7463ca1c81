"""Starts a script on several ranks, waits with a deadline, and leaves no process behind.

Each rank is a process of its own session with torchrun's environment, so `init_process_group` works as it does under
torchrun. If one rank fails or the deadline passes, all are killed and the error shows what the ranks wrote.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sglang_bridge.server import claim_port

REPOSITORY = Path(__file__).resolve().parents[2]


class LaunchError(AssertionError):
    """A rank failed or the deadline passed; the message holds the ranks' output."""


def launch(script: Path, ranks: int, *arguments: str, logs: Path, timeout_s: float = 180.0) -> None:
    """Run `script` on `ranks` local processes; return when all have exited with 0.

    Args:
        arguments: passed to every rank.
        logs: directory for the ranks' output (rank<i>.log).
    """
    logs.mkdir(parents=True, exist_ok=True)
    port = claim_port("127.0.0.1", 0)
    processes = [_start(script, rank, ranks, port, arguments, logs) for rank in range(ranks)]
    try:
        problem = _wait(processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            _kill(process)
    if problem is not None:
        tails = "\n".join(f"--- rank {r}\n{_tail(logs / f'rank{r}.log')}" for r in range(ranks))
        raise LaunchError(f"{script.name} on {ranks} ranks: {problem} (deadline {timeout_s:g} s)\n{tails}")


def _start(
    script: Path, rank: int, ranks: int, port: int, arguments: tuple[str, ...], logs: Path
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
    }
    with open(logs / f"rank{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def start_world(arguments: list[str], ranks: int, log: Path) -> subprocess.Popen[bytes]:
    """Start Python with these arguments as a world of its own: under torchrun where there are several ranks."""
    command = [sys.executable, *arguments]
    if ranks > 1:
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *run, *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with log.open("ab") as file:
        return subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=REPOSITORY
        )


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """What went wrong, or None once every rank has ended well."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [f"rank {rank} exited with {code}" for rank, code in enumerate(codes) if code]
        if failed:
            return ", ".join(failed)
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            return f"rank(s) {[rank for rank, code in enumerate(codes) if code is None]} did not finish"
        time.sleep(0.05)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(path: Path, lines: int = 40) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
