"""Finished episodes of an evaluation that is under way, so that an interrupted one goes on where it stopped.

    <place>/<digest of the conditions>/conditions.json    what is evaluated: policy, sampling, environment, files, seed
                                       <task>-<sample>.episode, or .failed while no attempt at it has succeeded
                                       results/           what is being written when all are played

Invariants: an episode (JSON) is on disk whole or not at all. Episodes of other conditions (another policy, other
sampling, another environment) are never counted, and never removed: they are in folders of their own, and go on when
they are asked for again. Nor are episodes of another task counted than the one that now has their number. A place
belongs to one evaluation at a time: the caller holds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async.rollout.evaluation_episode import EvaluatedEpisode

logger = logging.getLogger(__name__)

_CONDITIONS = "conditions.json"
_DIGEST = 16


class EvaluationJournal:
    """Episodes by task index and sample number. conditions: JSON that must be equal for episodes to be reused."""

    def __init__(self, place: Path, conditions: Mapping[str, Any]) -> None:
        written = json.dumps(conditions, sort_keys=True)
        self._place = place
        self._folder = place / hashlib.sha256(written.encode()).hexdigest()[:_DIGEST]
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / _CONDITIONS).write_text(written, encoding="utf-8")

    @property
    def results(self) -> Path:
        """Where results are written, before they are moved to where they belong; gone with the journal."""
        return self._folder / "results"

    def tell(self) -> None:
        """Log what is gone on with, and which other evaluations of this place were interrupted."""
        if len(self):
            logger.info("going on with an evaluation that has %d episodes (%s)", len(self), self._folder)
        for other in sorted(path.parent for path in self._place.glob(f"*/{_CONDITIONS}")):
            if other != self._folder:
                logger.info(
                    "left as it is: an interrupted evaluation with %d episodes under other conditions, in %s. It goes "
                    "on when it is asked for again; delete the folder if nobody will",
                    _episodes(other),
                    other,
                )

    def load(self, task: int, sample: int, task_id: str) -> EvaluatedEpisode | None:
        """The episode, or the last attempt at it if all failed; None if it has not been played. task_id: of the task
        that has this index now."""
        paths = (self._path(task, sample, failed) for failed in (False, True))
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["task_id"] != task_id:
            logger.warning(
                "%s is of task %s, but task %d is now %s: it is played again", path, kept["task_id"], task, task_id
            )
            return None
        return EvaluatedEpisode.from_json(kept["episode"])

    def save(self, task: int, sample: int, task_id: str, episode: EvaluatedEpisode) -> None:
        """Keep an attempt, in place of one that failed."""
        path = self._path(task, sample, episode.failed)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"task_id": task_id, "episode": episode.to_json()}), encoding="utf-8")
        os.replace(part, path)

    def __len__(self) -> int:
        return _episodes(self._folder)

    def clear(self) -> None:
        """Forget these episodes: the evaluation is complete and its result is written elsewhere."""
        shutil.rmtree(self._folder)
        with contextlib.suppress(OSError):  # others are in there
            self._place.rmdir()

    def _path(self, task: int, sample: int, failed: bool) -> Path:
        return self._folder / f"{task}-{sample}.{'failed' if failed else 'episode'}"


def _episodes(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*.episode"))
