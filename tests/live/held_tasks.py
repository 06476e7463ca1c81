"""The alternating tasks, held: episodes of later tasks do not begin until a file is there.

Options: `file`, its path, and `free`, the number of tasks that do not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async.rollout.environments import Split, Start, Task
from tests.live.alternating_tasks import AlternatingEnvironment, AlternatingTasks

_LOOK_S = 0.1


class HeldEnvironment(AlternatingEnvironment):
    def __init__(self, reward: float, file: Path | None) -> None:
        super().__init__(reward)
        self._file = file

    async def reset(self) -> Start:
        while self._file is not None and not self._file.exists():
            await asyncio.sleep(_LOOK_S)
        return await super().reset()


class HeldTasks(AlternatingTasks):
    def __init__(self, split: Split, file: Path, free: int) -> None:
        super().__init__(split)
        self._file, self._free = file, free

    def environment(self, task: Task) -> HeldEnvironment:
        held = self.split == "train" and task.data["index"] >= self._free
        return HeldEnvironment(float(next(self._episodes) % 2), self._file if held else None)


def build(options: Mapping[str, Any], split: Split, seed: int) -> HeldTasks:
    return HeldTasks(split, Path(options["file"]), int(options["free"]))
