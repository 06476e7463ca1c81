"""Child processes of a run: started in their own sessions, watched, and stopped to the last descendant.

Invariants: a part that ends unexpectedly is reported with the tail of its log; when the supervisor leaves its
`with` block, however it leaves it, no process that it started is alive, at the latest `STOP_GRACE_S` plus a
second later, also none that a part left behind when it was killed. If the supervisor itself is killed, the kernel
sends SIGTERM to its children (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from megatron_async.errors import UserError

STOP_GRACE_S = 3.5
"""Seconds between SIGTERM and SIGKILL: engines are stopped afterwards, and a Ctrl-C may take ten seconds in all."""

_PART_VARIABLE = "MEGATRON_ASYNC_PART"
"""Inherited by everything a part starts: finds its processes when their parent is gone (torchrun gives each rank a
session of its own, so neither process group nor session does)."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class PartFailed(UserError):
    """A part of the run ended by itself before its work was done."""


class StopRequested(BaseException):
    """SIGINT or SIGTERM arrived. A BaseException so that no `except Exception` on the way swallows it."""


def log_tail(path: Path, lines: int = 25) -> str:
    """The last `lines` lines of a log file, or a note that it is empty."""
    if not path.exists():
        return f"(no log at {path})"
    text = path.read_bytes()[-20_000:].decode("utf-8", "replace").strip()
    return "\n".join(text.splitlines()[-lines:]) or f"({path} is empty)"


class Part:
    """One child process with its log file. environment: variables on top of this process's own."""

    def __init__(
        self, name: str, argv: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.log_path = log_path
        self._mark = uuid.uuid4().hex
        self._environment = {**os.environ, **(environment or {}), _PART_VARIABLE: self._mark}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def poll(self) -> int | None:
        """Exit code, or None while it runs (also None before it was started)."""
        return self._process.poll() if self._process else None

    def failure(self) -> PartFailed:
        return PartFailed(
            f"{self.name} ended with exit code {self.poll()}; its log is {self.log_path}, which ends:\n"
            f"{log_tail(self.log_path)}"
        )

    def descendants(self) -> list[psutil.Process]:
        """The process itself and everything it started, directly or not, that is alive."""
        if self._process is None:
            return []
        return [process for process in psutil.process_iter() if _mark_of(process) == self._mark]


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(_PART_VARIABLE)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None  # it has just ended, or is another user's


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_all(parts: Sequence[Part], grace_s: float = STOP_GRACE_S) -> None:
    """SIGTERM to every part, then SIGKILL to whatever of their descendants is left after `grace_s` seconds."""
    alive = {process.pid: process for part in parts for process in part.descendants()}
    for part in parts:
        if part.poll() is None and part.pid is not None:
            os.kill(part.pid, signal.SIGTERM)
        else:
            _terminate(part.descendants())  # nothing else tells them
    _, stubborn = psutil.wait_procs(list(alive.values()), timeout=grace_s)
    late = {process.pid: process for part in parts for process in part.descendants()}
    left = list({**{p.pid: p for p in stubborn}, **late}.values())
    for process in left:
        if process.is_running():
            process.kill()
    psutil.wait_procs(left, timeout=2.0)
    for part in parts:
        part.poll()


def _terminate(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.terminate()


@contextmanager
def supervised(parts: list[Part]) -> Iterator[list[Part]]:
    """Stops every part of the list (parts may be added inside) when the block ends for any reason."""
    try:
        yield parts
    finally:
        with _signals_ignored():
            stop_all(parts)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within the block SIGINT and SIGTERM raise StopRequested in the main thread."""

    def handler(signum: int, _frame: FrameType | None) -> None:
        raise StopRequested(signal.Signals(signum).name)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """A second Ctrl-C must not interrupt the stopping itself, which is bounded in time."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def watch(
    parts: Sequence[Part], finished: Callable[[], bool], *ticks: Callable[[], None], poll_s: float = 0.5
) -> None:
    """Wait until `finished()`; raise PartFailed as soon as a part ends with a code other than zero.

    ticks: called at every poll (progress display, other things to watch).
    """
    while not finished():
        for part in parts:
            if part.poll() not in (None, 0):
                raise part.failure()
        for tick in ticks:
            tick()
        time.sleep(poll_s)


def python_module(module: str, *arguments: str) -> list[str]:
    """argv that runs a module with the interpreter of this process."""
    return [sys.executable, "-u", "-m", module, *arguments]
