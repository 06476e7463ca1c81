"""Tasks and environments that live in a process of their own, as the rollout sees them.

Invariants
- The interface is that of environments in this process: the agent loop cannot tell them apart.
- A process that died fails the episodes it held (`EnvironmentFailure`, with the end of its log), and is started again
  when the next one is asked for.
- The other Python sees our package and its own packages, none of ours.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import megatron_async
from megatron_async.errors import UserError
from megatron_async.rollout.environments.base import (
    AssistantTurn,
    EnvironmentFailure,
    Outcome,
    Split,
    Start,
    Step,
    Task,
    TaskSource,
)
from megatron_async.rollout.environments.served.protocol import (
    LINE_LIMIT,
    as_json,
    decode,
    encode,
    result_of,
    start_from,
    step_from,
)

START_S = 120.0
"""Longest wait for the process to listen: the import of an interpreter and our package on a loaded machine."""
CALL_S = 900.0
"""Longest wait for tasks or a report; calls of an episode have the agent loop's deadlines."""
_POLL_S = 0.02
_LOG_TAIL = 2000


class EnvironmentProcess:
    """One process of environments, started when first needed."""

    def __init__(self, python: str) -> None:
        """python: path of the interpreter. Raises UserError when there is none."""
        if shutil.which(python) is None:
            raise UserError(f"environment.options.python={python!r}: no such interpreter")
        self.python = python
        self._folder = Path(tempfile.mkdtemp(prefix="environments-"))  # mode 0700
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        # Our package alone: the folder it lies in may hold the very packages that clash.
        (self._folder / "megatron_async").symlink_to(Path(megatron_async.__file__).parent)
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._number = 0

    @property
    def path(self) -> str:
        """The socket of the process that runs now."""
        return str(self._folder / f"{self._number}.sock")

    def ensure(self) -> str:
        """The path of the socket; starts the process if there is none. EnvironmentFailure if it does not come up."""
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._start()
        return self.path

    def died(self) -> EnvironmentFailure:
        """The error that says how the connection was lost."""
        status = None if self._process is None else self._process.poll()
        state = "closed the connection" if status is None else f"ended with status {status}"
        return EnvironmentFailure(
            f"the process of environments ({self.python}) {state}; its log ends:\n{self._log()}"
        )

    def stop(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None and self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60)

    def _start(self) -> None:
        self._number += 1
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self.python, "-m", "megatron_async.rollout.environments.served.server", self.path],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
            )
        deadline = time.monotonic() + START_S
        while not self._listens():
            if self._process.poll() is not None:
                raise self.died()
            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    f"the process of environments ({self.python}) does not listen after {START_S:g} s; its log ends:\n"
                    f"{self._log()}"
                )
            time.sleep(_POLL_S)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(self.path) == 0

    def _log(self) -> str:
        log = self._folder / "log"
        return log.read_text(errors="replace")[-_LOG_TAIL:] if log.exists() else ""


@functools.cache
def _process(python: str) -> EnvironmentProcess:
    """One process per interpreter serves all tasks of this one."""
    return EnvironmentProcess(python)


class ServedTasks:
    """Tasks of one source in another process."""

    def __init__(
        self, process: EnvironmentProcess, asked: Mapping[str, Any], opened: Mapping[str, Any], split: Split
    ) -> None:
        """opened: what the process said about the source. Made by `serve_tasks`."""
        self.split: Split = split
        self.size: int | None = opened["size"]
        self._labels: dict[str, str] = opened["labels"]
        self._process, self._asked = process, dict(asked)
        self._known: dict[int, Task] = {}

    def task(self, index: int) -> Task:
        """Task `index`; IndexError past the end."""
        if index not in self._known:
            self._known[index] = Task(**_ask(self._process, self._asked, {"call": "task", "index": index}))
        return self._known[index]

    def labels(self) -> dict[str, str]:
        """What the source says that is unusual about it; empty if it says nothing."""
        return dict(self._labels)

    def environment(self, task: Task) -> ServedEnvironment:
        """A fresh episode of `task`; connects when it is reset."""
        return ServedEnvironment(self._process, self._asked, task)


class ServedReportingTasks(ServedTasks):
    """The same, of a source that reports in a benchmark's own terms."""

    def report(self, outcomes: Sequence[Outcome], samples: int, folder: Path) -> dict[str, Any]:
        """The other process writes into `folder`."""
        request = {
            "call": "report",
            "outcomes": [as_json(outcome) for outcome in outcomes],
            "samples": samples,
            "folder": str(folder.resolve()),
        }
        summary: dict[str, Any] = _ask(self._process, self._asked, request)
        for name in ("pass_hat", "pass_at"):  # JSON knows no integer keys
            if name in summary:
                summary[name] = {int(k): value for k, value in summary[name].items()}
        return summary


def serve_tasks(python: str, target: str, options: Mapping[str, Any], split: Split, seed: int) -> TaskSource:
    """The tasks that the factory `target` ("package.module:factory") builds under another interpreter.

    Raises what the factory raises, and UserError for an interpreter that is not there.
    """
    process = _process(python)
    asked = {"target": target, "options": dict(options), "split": split, "seed": seed}
    opened = _ask(process, asked)
    kind = ServedReportingTasks if opened["reports"] else ServedTasks
    return kind(process, asked, opened, split)


def _ask(
    process: EnvironmentProcess, asked: Mapping[str, Any], request: Mapping[str, Any] | None = None
) -> Any:
    """One call about tasks, blocking, over a connection of its own; None asks for the source itself."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CALL_S)
        try:
            connection.connect(process.ensure())
            with connection.makefile("rwb") as stream:
                result = None
                for message in ({"call": "tasks", **asked}, request):
                    if message is None:
                        continue
                    stream.write(encode(message))
                    stream.flush()
                    line = stream.readline()
                    if not line:
                        raise process.died()
                    result = result_of(decode(line), process.python)
                return result
        except ConnectionError as error:
            raise process.died() from error


class ServedEnvironment:
    """One episode in another process. A call that was cancelled leaves nothing behind: the connection ends with it."""

    def __init__(self, process: EnvironmentProcess, asked: Mapping[str, Any], task: Task) -> None:
        self._process, self._asked, self._task = process, dict(asked), task
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def reset(self) -> Start:
        path = await asyncio.to_thread(self._process.ensure)
        try:
            self._streams = await asyncio.open_unix_connection(path, limit=LINE_LIMIT)
        except OSError as error:
            raise self._process.died() from error
        await self._call("tasks", **self._asked)
        await self._call("environment", task=as_json(self._task))
        return start_from(await self._call("reset"))

    async def step(self, turn: AssistantTurn) -> Step:
        return step_from(await self._call("step", turn=as_json(turn)))

    async def reward(self) -> tuple[float, dict[str, Any]]:
        reward, info = await self._call("reward")
        return float(reward), info

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _call(self, name: str, **values: Any) -> Any:
        if self._streams is None:
            raise EnvironmentFailure(f"{name}: the environment is not connected (reset comes first)")
        reader, writer = self._streams
        try:
            writer.write(encode({"call": name, **values}))
            await writer.drain()
            line = await reader.readline()
        except ConnectionError as error:
            raise self._process.died() from error
        if not line:
            raise self._process.died()
        return result_of(decode(line), self._process.python)
