"""The process that holds environments: `python -m megatron_async.rollout.environments.served.server SOCKET`.

Invariants
- It listens on a Unix socket only, in a folder that nobody but its user can enter.
- It ends when its standard input does, so it never outlives the process that started it.
- A connection's environment is closed when the connection ends, however it ends.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_async.rollout.environments.base import (
    DescribedTaskSource,
    Environment,
    LabelledTaskSource,
    NamedTaskSource,
    ReplayableTaskSource,
    ReportingTaskSource,
    Task,
    TaskSource,
)
from megatron_async.rollout.environments.served.protocol import (
    LINE_LIMIT,
    as_json,
    decode,
    encode,
    failure,
    outcome_from,
    turn_from,
)
from megatron_async.rollout.readable import readable

logger = logging.getLogger(__name__)

GRACE_S = 60.0
"""How long environments may take to close once the process that started this one is gone."""


class Sources:
    """The task sources that were asked for, built once each."""

    def __init__(self) -> None:
        self._built: dict[str, TaskSource] = {}
        self._building = asyncio.Lock()

    async def get(self, asked: Mapping[str, Any]) -> TaskSource:
        """The source of {"target", "options", "split", "seed"}; raises what its factory raises."""
        key = json.dumps(asked, sort_keys=True)
        async with self._building:
            if key not in self._built:
                self._built[key] = await asyncio.to_thread(_build, asked)
        return self._built[key]


def _build(asked: Mapping[str, Any]) -> TaskSource:
    module, _, attribute = asked["target"].partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    source: TaskSource = factory(asked["options"], asked["split"], asked["seed"])
    return source


class Connection:
    """One connection: the tasks of one source, or one episode of it."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._source: TaskSource | None = None
        self._environment: Environment | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the other side hangs up."""
        try:
            while line := await reader.readline():
                writer.write(await self._answer(line))
                await writer.drain()
        except ConnectionError:
            logger.info("a connection broke")
        finally:
            writer.close()
            if self._environment is not None:
                await self._environment.close()

    async def _answer(self, line: bytes) -> bytes:
        try:
            request = decode(line)
            return encode({"result": await self._call(request.pop("call"), request)})
        except (Exception, SystemExit) as error:  # one episode that exits must not end the others
            logger.warning("answered with an error", exc_info=True)
            return encode(failure(error))

    async def _call(self, name: str, request: dict[str, Any]) -> Any:
        if name == "ping":  # a sign of life: the event loop goes round
            return None
        if name == "tasks":
            self._source = await self._sources.get(request)
            return _description(self._source)
        if self._source is None:
            raise ValueError(f"{name}: a connection begins with `tasks`")
        if name == "tasks_from":
            return _tasks(self._source, request["start"], request["count"])
        if name == "replayable":
            return _replayable(self._source, Task(**request["task"]))
        if name == "environment":
            self._environment = self._source.environment(Task(**request["task"]))
            return None
        if name == "report":
            return await asyncio.to_thread(_report, self._source, request)
        return await self._episode(name, request)

    async def _episode(self, name: str, request: dict[str, Any]) -> Any:
        environment = self._environment
        if environment is None:
            raise ValueError(f"{name}: this connection has no environment")
        if name == "reset":
            return as_json(await environment.reset())
        if name == "step":
            return as_json(await environment.step(turn_from(request["turn"])))
        if name == "reward":
            reward, info = await environment.reward()
            return float(reward), readable(info)
        if name == "close":
            self._environment = None
            await environment.close()
            return None
        raise ValueError(f"unknown call {name!r}")


def _description(source: TaskSource) -> dict[str, Any]:
    return {
        "size": source.size,
        "reports": isinstance(source, ReportingTaskSource),
        "labels": source.labels() if isinstance(source, LabelledTaskSource) else {},
        "described": source.described() if isinstance(source, DescribedTaskSource) else {},
        "folder_name": source.folder_name() if isinstance(source, NamedTaskSource) else "",
    }


def _tasks(source: TaskSource, start: int, count: int) -> list[dict[str, Any]]:
    tasks = []
    for index in range(start, start + count):
        try:
            task = source.task(index)
        except IndexError:
            break
        tasks.append({"task": as_json(task), "replayable": _replayable(source, task)})
    return tasks


def _replayable(source: TaskSource, task: Task) -> bool:
    return isinstance(source, ReplayableTaskSource) and source.replayable(task)


def _report(source: TaskSource, request: Mapping[str, Any]) -> dict[str, Any]:
    assert isinstance(source, ReportingTaskSource)
    outcomes = [outcome_from(outcome) for outcome in request["outcomes"]]
    return source.report(outcomes, request["samples"], Path(request["folder"]))


async def serve(socket: str) -> None:
    """Listen until standard input ends."""
    sources = Sources()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Connection(sources).serve(reader, writer)

    server = await asyncio.start_unix_server(connected, socket, limit=LINE_LIMIT)
    ended = asyncio.Event()
    end = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set)
    threading.Thread(target=_end_with_parent, args=(end,), daemon=True).start()
    async with server:
        await ended.wait()


def _end_with_parent(end: Callable[[], Any]) -> None:
    """In a thread: an event loop that stands still does not see that nobody needs it any more."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    end()
    time.sleep(GRACE_S)
    os._exit(1)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    asyncio.run(serve(sys.argv[1]))


if __name__ == "__main__":
    main()
