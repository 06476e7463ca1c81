"""Finished episodes of an evaluation that is under way, so that an interrupted one goes on where it stopped.

    <folder>/conditions.json       what was being evaluated: policy, sampling, environment, files, seed
    <folder>/<task>-<sample>.episode

Invariants: an episode (JSON) is on disk whole or not at all; episodes of other conditions (another policy, other
sampling, another environment) are never counted: they are removed when the journal is opened. Nor are episodes of
another task than the one that now has their number. A folder belongs to one evaluation at a time: the caller holds it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async.rollout.evaluation_episode import EvaluatedEpisode

logger = logging.getLogger(__name__)


class EvaluationJournal:
    """Episodes by task index and sample number. conditions: JSON that must be equal for episodes to be reused."""

    def __init__(self, folder: Path, conditions: Mapping[str, Any]) -> None:
        self._folder = folder
        written = json.dumps(conditions, sort_keys=True)
        known = folder / "conditions.json"
        if not known.is_file() or known.read_text(encoding="utf-8") != written:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            known.write_text(written, encoding="utf-8")

    def load(self, task: int, sample: int, task_id: str) -> EvaluatedEpisode | None:
        """The episode, or None if it has not been played. task_id: of the task that has this index now."""
        path = self._path(task, sample)
        if not path.is_file():
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["task_id"] != task_id:
            logger.warning(
                "%s is of task %s, but task %d is now %s: it is played again", path, kept["task_id"], task, task_id
            )
            return None
        return EvaluatedEpisode.from_json(kept["episode"])

    def save(self, task: int, sample: int, task_id: str, episode: EvaluatedEpisode) -> None:
        """Keep a finished episode."""
        path = self._path(task, sample)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"task_id": task_id, "episode": episode.to_json()}), encoding="utf-8")
        os.replace(part, path)

    def __len__(self) -> int:
        return sum(1 for _ in self._folder.glob("*.episode"))

    def clear(self) -> None:
        """Forget everything: the evaluation is complete and its result is written elsewhere."""
        shutil.rmtree(self._folder)

    def _path(self, task: int, sample: int) -> Path:
        return self._folder / f"{task}-{sample}.episode"
