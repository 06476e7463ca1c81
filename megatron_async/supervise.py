"""Child processes of a run: started in their own sessions, watched, and stopped to the last descendant.

Invariants: a part that ends unexpectedly is reported with how it ended and the tail of its log; when the supervisor
leaves its `with` block, however it leaves it, no process that it started is alive, at the latest `STOP_GRACE_S` plus a
second later, also none that a part left behind when it was killed. A second Ctrl-C kills them all at once. If the
supervisor itself is killed, whenever, its children get SIGTERM (from the kernel, PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from megatron_async.errors import ERROR_FILE, UserError
from megatron_async.heart import BEATS_VARIABLE

STOP_GRACE_S = 3.5
"""Seconds between SIGTERM and SIGKILL: engines are stopped afterwards, and a Ctrl-C may take ten seconds in all."""

KILL_S = 10.0
"""Seconds within which a process that gets SIGKILL is gone."""

PART_VARIABLE = "MEGATRON_ASYNC_PART"
"""Inherited by everything a part starts: finds its processes when their parent is gone (torchrun gives each rank a
session of its own, so neither process group nor session does). Begins with the supervisor's process id and a dot."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class PartFailed(UserError):
    """A part of the run ended by itself before its work was done."""


class StopRequested(BaseException):
    """SIGINT or SIGTERM arrived. A BaseException so that no `except Exception` on the way swallows it.

    outcome: what the run comes to, in words that follow the signal's name. at_once: nothing is to be waited for.
    """

    def __init__(self, by: str, *, outcome: str = "", at_once: bool = False) -> None:
        super().__init__(by)
        self.outcome, self.at_once = outcome, at_once


@dataclass(slots=True)
class Asked:
    """by: the signal that asked for a stop; empty while none did."""

    by: str = ""


def log_tail(path: Path, lines: int = 25) -> str:
    """The last `lines` lines of a log file, or a note that it is empty."""
    if not path.exists():
        return f"(no log at {path})"
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
        text = file.read().decode("utf-8", "replace").strip()
    return "\n".join(text.splitlines()[-lines:]) or f"({path} is empty)"


def describe_exit(code: int | None) -> str:
    """How a process ended, in words: its exit code, or the signal that killed it. code: as `Popen.returncode`.

    >>> describe_exit(3)
    'ended with exit code 3'
    >>> describe_exit(-15)
    'was killed by SIGTERM'
    """
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    name = known.get(-code, f"signal {-code}")
    hint = " (by someone, or by the kernel for lack of memory: see `dmesg`)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


class Part:
    """One child process with its log file. environment: the variables it gets on top of `inherited` (default: this
    process's own)."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.log_path = log_path
        self.mark = f"{os.getpid()}.{uuid.uuid4().hex}"
        """In the environment of all its processes."""
        inherited = os.environ if inherited is None else inherited
        self._said, self._beats = log_path.with_suffix(".error"), log_path.with_suffix(".beats")
        ours = {
            PART_VARIABLE: self.mark,
            ERROR_FILE: str(self._said.resolve()),
            BEATS_VARIABLE: str(self._beats.resolve()),
        }
        self._environment = {**inherited, **(environment or {}), **ours}
        self._process: subprocess.Popen[bytes] | None = None
        self._killed_for = ""

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._said.unlink(missing_ok=True)  # of an earlier start
        shutil.rmtree(self._beats, ignore_errors=True)
        self._killed_for = ""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, parent=os.getpid()),
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def poll(self) -> int | None:
        """Exit code, or None while it runs (also None before it was started)."""
        return self._process.poll() if self._process else None

    def user_error(self) -> str:
        """What one of its processes said, since the start, that the user has to mend; empty when none did. Under
        torchrun no exit code tells."""
        return self._said.read_text(encoding="utf-8") if self._said.exists() else ""

    def ending(self) -> str:
        """How it ended, in words."""
        return f"was ended: {self._killed_for}" if self._killed_for else describe_exit(self.poll())

    def failure(self) -> PartFailed:
        said = f": {message}\n" if (message := self.user_error()) else "; "
        return PartFailed(
            f"{self.name} {self.ending()}{said}its log is {self.log_path}, which ends:\n{log_tail(self.log_path)}"
        )

    def kill(self, why: str) -> None:
        """End all its processes at once. why: what is said of it, until it is started again.

        Raises PartFailed when it is not dead after `KILL_S` seconds.
        """
        assert self._process is not None, "it was started"
        self._killed_for = why
        processes = self.descendants()
        _kill_all([self])
        try:
            self._process.wait(KILL_S)
            psutil.wait_procs(processes, timeout=KILL_S)
        except subprocess.TimeoutExpired:
            raise PartFailed(
                f"{self.name} stands still ({why}), and its process {self.pid} cannot be killed: its disk or device "
                f"does not answer the kernel; its log is {self.log_path}"
            ) from None

    def beats(self) -> dict[int, int]:
        """When each of its processes last gave a sign of life, by process id: nanoseconds of its own clock, to be
        compared with nothing but themselves."""
        try:
            return {int(file.name): file.stat().st_mtime_ns for file in self._beats.iterdir()}
        except OSError:
            return {}  # none gave any yet

    def owns(self, pid: int) -> bool:
        """Whether a process of this id is alive and its own."""
        try:
            process = psutil.Process(pid)
            return process.status() != psutil.STATUS_ZOMBIE and _mark_of(process) == self.mark
        except psutil.NoSuchProcess:
            return False

    def descendants(self) -> list[psutil.Process]:
        """The process itself and everything it started, directly or not, that is alive. What was started without the
        mark, in an environment of its own, is found as long as whoever started it lives."""
        if self._process is None:
            return []
        processes = list(psutil.process_iter())
        marked = [process for process in processes if _mark_of(process) == self.mark]
        return [*marked, *_below({process.pid for process in marked}, processes)]


def _below(found: set[int], processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Children of the processes `found`, and theirs, which are not among them."""
    children: dict[int, list[psutil.Process]] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            children.setdefault(process.ppid(), []).append(process)
    below: list[psutil.Process] = []
    parents = list(found)
    while parents:
        new = [child for child in children.get(parents.pop(), []) if child.pid not in found]
        found |= {child.pid for child in new}
        parents += [child.pid for child in new]
        below += new
    return below


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(PART_VARIABLE)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None  # it has just ended, or is another user's


def end_with_parent(number: signal.Signals = signal.SIGTERM, *, parent: int | None = None) -> None:
    """Get a signal when the process that started this one ends, at once where it has ended already. Ranks ask for it
    themselves: torchrun gives its children nothing of the kind, and one that is killed would leave them training beside
    those that come after.

    parent: the id of that process. None: for processes of a part, which know it by the part's mark.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    # The kernel tells nothing of a parent that ended before it was asked, which for a rank takes seconds of imports.
    if not (_started_by_part() if parent is None else os.getppid() == parent):
        os.kill(os.getpid(), number)


def _started_by_part() -> bool:
    """Whether this process's parent is the supervisor of its part, or a process of the same part: whoever takes over
    children whose parent is gone (the first process of a machine or container, a manager of sessions) is neither."""
    parent, mark = os.getppid(), os.environ.get(PART_VARIABLE, "")
    if mark.startswith(f"{parent}."):
        return True
    try:
        return _mark_of(psutil.Process(parent)) == mark
    except psutil.NoSuchProcess:
        return False


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
    except StopRequested as stop:
        if stop.at_once:
            _kill_all(parts)
        raise
    finally:
        with on_second_signal(lambda: _kill_all(parts)):
            stop_all(parts)


def _kill_all(parts: Sequence[Part]) -> None:
    for part in parts:
        for process in part.descendants():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within the block SIGINT and SIGTERM raise StopRequested in the main thread."""

    def handler(signum: int, _frame: FrameType | None) -> None:
        raise StopRequested(signal.Signals(signum).name)

    with _handling(handler):
        yield


@contextmanager
def first_signal_asks() -> Iterator[Asked]:
    """Within the block the first SIGINT or SIGTERM is noted, for whoever looks; a further one raises StopRequested, for
    a stop at once. A first one that nobody looked at raises it at the end of the block."""
    asked = Asked()

    def handler(signum: int, _frame: FrameType | None) -> None:
        name = signal.Signals(signum).name
        if asked.by:
            raise StopRequested(name, at_once=True)
        asked.by = name

    with _handling(handler):
        yield asked
    if asked.by:
        raise StopRequested(asked.by)


@contextmanager
def on_second_signal(kill: Callable[[], None]) -> Iterator[None]:
    """While the block stops things, which is bounded in time and must not be interrupted, a SIGINT or SIGTERM only
    makes it faster: it calls `kill`."""

    def handler(signum: int, _frame: FrameType | None) -> None:
        kill()

    with _handling(handler):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread alone
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
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
