"""Finished episodes of an evaluation that is under way, so that an interrupted one goes on where it stopped.

    <folder>/conditions.json       what was being evaluated: version, sampling, environment
    <folder>/<task>-<sample>.episode

Invariants: an episode (JSON) is on disk whole or not at all; episodes of other conditions (another policy version,
other sampling, another environment) are never counted: they are removed when the journal is opened.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async.rollout.evaluation_episode import EvaluatedEpisode


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

    def load(self, task: int, sample: int) -> EvaluatedEpisode | None:
        """The episode, or None if it has not been played."""
        path = self._path(task, sample)
        return EvaluatedEpisode.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None

    def save(self, task: int, sample: int, episode: EvaluatedEpisode) -> None:
        """Keep a finished episode."""
        path = self._path(task, sample)
        part = path.with_suffix(".part")
        part.write_text(episode.to_json(), encoding="utf-8")
        os.replace(part, path)

    def __len__(self) -> int:
        return sum(1 for _ in self._folder.glob("*.episode"))

    def clear(self) -> None:
        """Forget everything: the evaluation is complete and its result is written elsewhere."""
        shutil.rmtree(self._folder)

    def _path(self, task: int, sample: int) -> Path:
        return self._folder / f"{task}-{sample}.episode"
