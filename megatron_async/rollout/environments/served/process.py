"""The process that holds environments, as the one that needs them sees it: started, watched, and replaced.

Invariants
- A process that ended is started again when it is next asked for.
- A process whose event loop stands still (an environment computes, sleeps or waits in there without `await`) is killed
  once it has given no sign of life for `ANSWER_S`. That ends all its connections, so every call that waits fails.
- Nobody waits for a sign of life in an event loop: it is asked for in a thread, by one at a time.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import megatron_async
from megatron_async.errors import MissingHere
from megatron_async.rollout.environments.base import EnvironmentFailure
from megatron_async.rollout.environments.served.protocol import encode

START_S = 120.0
"""Longest wait for the process to listen: the import of an interpreter and our package on a loaded machine."""
WATCH_S = 30.0
"""How long a call waits before the process is asked for a sign of life."""
ANSWER_S = 30.0
"""Longest wait for a sign of life. A living process gives it between two steps of its environments."""
_POLL_S = 0.02
_LOG_TAIL = 2000


class EnvironmentProcess:
    """One process of environments, started when first needed."""

    def __init__(self, python: str) -> None:
        """python: path of the interpreter. Raises MissingHere when there is none."""
        if shutil.which(python) is None:
            raise MissingHere(f"environment.options.python={python!r}: no such interpreter")
        self.python = python
        self._folder = Path(tempfile.mkdtemp(prefix="environments-"))  # mode 0700
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        # Our package alone: the folder it lies in may hold the very packages that clash.
        (self._folder / "megatron_async").symlink_to(Path(megatron_async.__file__).parent)
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._checking = threading.Lock()
        self._number = 0
        self._ends: dict[int, str] = {}  # of earlier processes, by number

    def ensure(self) -> tuple[str, int]:
        """(path of its socket, number of the process); starts one if there is none.

        EnvironmentFailure if it does not come up.
        """
        with self._starting:
            status = None if self._process is None else self._process.poll()
            if status is not None:
                self._ends.setdefault(self._number, f"ended with status {status}")
            if self._process is None or status is not None:
                self._start()
            return self._path(self._number), self._number

    def died(self, number: int) -> EnvironmentFailure:
        """The error that says how the connection to process `number` was lost."""
        status = self._process.poll() if self._process is not None and number == self._number else None
        state = "closed the connection" if status is None else f"ended with status {status}"
        state = self._ends.get(number, state)
        return EnvironmentFailure(
            f"the process of environments ({self.python}) {state}; its log ends:\n{self._log()}"
        )

    def lives(self, number: int) -> bool:
        """Whether process `number` gives a sign of life; killed if it keeps silent. Blocks for up to `ANSWER_S`."""
        with self._checking:
            try:
                return self._answers(number)
            except (TimeoutError, BlockingIOError):  # the second: so many wait that no more may
                self.kill(number, f"gave no sign of life for {ANSWER_S:g} s and was killed")
            except OSError:
                return False  # it is gone, or about to be
            return False

    def check_soon(self, number: int) -> None:
        """`lives` in a thread, unless somebody is asking already."""
        if not self._checking.locked():
            threading.Thread(target=self.lives, args=(number,), daemon=True).start()

    def kill(self, number: int, why: str) -> None:
        """End process `number` at once, if it still runs; the next call starts another. why: for the error."""
        with self._starting:
            if number == self._number and self._process is not None and self._process.poll() is None:
                self._ends[number] = why
                self._process.kill()
                self._process.wait()

    def stop(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None and self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60)

    def _start(self) -> None:
        self._number += 1
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        path = self._path(self._number)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self.python, "-m", "megatron_async.rollout.environments.served.server", path],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
            )
        deadline = time.monotonic() + START_S
        while not _listens(path):
            if self._process.poll() is not None:
                raise self.died(self._number)
            if time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                raise EnvironmentFailure(
                    f"the process of environments ({self.python}) does not listen after {START_S:g} s; its log ends:\n"
                    f"{self._log()}"
                )
            time.sleep(_POLL_S)

    def _path(self, number: int) -> str:
        return str(self._folder / f"{number}.sock")

    def _answers(self, number: int) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(self._path(number))
            connection.sendall(encode({"call": "ping"}))
            return bool(connection.recv(1))

    def _log(self) -> str:
        log = self._folder / "log"
        return log.read_text(errors="replace")[-_LOG_TAIL:] if log.exists() else ""


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0
