"""Tasks and environments that live in a process of their own, as the rollout sees them.

Invariants
- The interface is that of environments in this process: the agent loop cannot tell them apart.
- A process that died or stands still fails the episodes it held (`EnvironmentFailure`, with the end of its log), and is
  started again when the next one is asked for.
- Nothing that an event loop calls waits for the process, but for a task that was not fetched yet (`tasks_ahead`).
- The other Python sees our package and its own packages, none of ours.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from megatron_async.rollout.environments.served import process as processes
from megatron_async.rollout.environments.served.process import EnvironmentProcess
from megatron_async.rollout.environments.served.protocol import (
    LINE_LIMIT,
    as_json,
    decode,
    encode,
    result_of,
    start_from,
    step_from,
)
from megatron_async.rollout.environments.served.tasks_ahead import TasksAhead

CALL_S = 900.0
"""Longest wait for tasks or a report; calls of an episode have the agent loop's deadlines."""


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
        self._described: dict[str, Any] = opened["described"]
        self._folder_name: str = opened["folder_name"]
        self._process, self._asked = process, dict(asked)
        self._ahead = TasksAhead(self.size, self._fetch)

    def _fetch(self, start: int, count: int) -> list[dict[str, Any]]:
        request = {"call": "tasks_from", "start": start, "count": count}
        items: list[dict[str, Any]] = _ask(self._process, self._asked, request)
        return items

    def task(self, index: int) -> Task:
        """Task `index`; IndexError past the end, EnvironmentFailure if the process fails twice in a row."""
        return Task(**self._ahead.item(index)["task"])

    def replayable(self, task: Task) -> bool:
        """Whether the source says that environments of this task can be played again."""
        for item in self._ahead.known():
            if item["task"]["task_id"] == task.task_id:
                return bool(item["replayable"])
        return bool(_ask(self._process, self._asked, {"call": "replayable", "task": as_json(task)}))

    def labels(self) -> dict[str, str]:
        """What the source says that is unusual about it; empty if it says nothing."""
        return dict(self._labels)

    def described(self) -> dict[str, Any]:
        """Which tasks the source says it has; empty if it says nothing."""
        return dict(self._described)

    def folder_name(self) -> str:
        """The source's name for folders of results; empty if it has none."""
        return self._folder_name

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
        for name in ("pass_hat", "pass_at", "pass_hat_95", "pass_at_95"):  # JSON knows no integer keys
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
    """One call about tasks, blocking, over a connection of its own; None asks for the source itself.

    EnvironmentFailure if the process dies, stands still, or has not answered after `CALL_S`; it is then replaced.
    """
    path, number = process.ensure()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(processes.WATCH_S)
        waiting = _Waiting(process, number, time.monotonic() + CALL_S)
        try:
            connection.connect(path)
            result = None
            for message in ({"call": "tasks", **asked}, request):
                if message is not None:
                    connection.sendall(encode(message))
                    result = result_of(decode(waiting.line(connection)), process.python)
            return result
        except (ConnectionError, FileNotFoundError, TimeoutError) as error:
            process.lives(number)
            raise process.died(number) from error


class _Waiting:
    """Waits for answers of one process for as long as it lives."""

    def __init__(self, process: EnvironmentProcess, number: int, deadline: float) -> None:
        self._process, self._number, self._deadline = process, number, deadline

    def line(self, connection: socket.socket) -> bytes:
        """The next line of the connection. EnvironmentFailure if none comes."""
        received = bytearray()
        while not received.endswith(b"\n"):
            try:
                part = connection.recv(2**16)
            except TimeoutError:
                self._check()
                continue
            if not part:
                raise self._process.died(self._number)
            received += part
        return bytes(received)

    def _check(self) -> None:
        if time.monotonic() > self._deadline:
            self._process.kill(self._number, f"did not answer in {CALL_S:g} s and was killed")
        elif self._process.lives(self._number):
            return
        raise self._process.died(self._number)


class ServedEnvironment:
    """One episode in another process. A call that was cancelled leaves nothing behind: the connection ends with it."""

    def __init__(self, process: EnvironmentProcess, asked: Mapping[str, Any], task: Task) -> None:
        self._process, self._asked, self._task = process, dict(asked), task
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._number = 0

    async def reset(self) -> Start:
        path, self._number = await asyncio.to_thread(self._process.ensure)
        try:
            self._streams = await asyncio.open_unix_connection(path, limit=LINE_LIMIT)
        except OSError as error:
            self._process.check_soon(self._number)
            raise self._process.died(self._number) from error
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
            line = await self._line(reader)
        except ConnectionError as error:
            raise self._process.died(self._number) from error
        if not line:
            raise self._process.died(self._number)
        return result_of(decode(line), self._process.python)

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        """The answer. The process is watched while it is awaited, and once more when nobody awaits it any longer."""
        answer = asyncio.ensure_future(reader.readline())
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=processes.WATCH_S)
                if not answer.done():
                    self._process.check_soon(self._number)  # kills it if it stands still, which ends the connection
            return answer.result()
        except asyncio.CancelledError:
            answer.cancel()
            self._process.check_soon(self._number)
            raise
