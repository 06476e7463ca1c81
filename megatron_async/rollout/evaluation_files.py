"""Where results of evaluations lie, and how they come there.

    <run>/evaluation/<who>/<what>/evaluation.json, evaluation.md    and what the task source writes itself
                                  earlier/<n>/                      results that lay there before, the oldest in 1
                                  under_way/                        episodes of what is not whole (`evaluation_journal`)

who: the checkpoint or the endpoint's model, `engines` of the run, or `after_<steps>_steps` of a job. what: which tasks,
in the task source's words (`NamedTaskSource`), else the environment's name.

Invariants: results are moved into their folder once all of them are written; none is ever overwritten or deleted: what
lay there before is moved aside, and that is logged.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from megatron_async.config.schema import RunConfig
from megatron_async.observe import RunFiles
from megatron_async.observe.rows import finite
from megatron_async.rollout.environments import build_task_source
from megatron_async.rollout.environments.base import NamedTaskSource
from megatron_async.rollout.evaluation_statistics import EvaluationResult, describe

logger = logging.getLogger(__name__)

RESULT = "evaluation.json"
PAGE = "evaluation.md"
EARLIER = "earlier"


def results_folder(config: RunConfig, who: str) -> Path:
    """The folder for an evaluation of `who` on the held-out tasks of `config`, under the run's; nothing is made."""
    source = build_task_source(config.environment, "heldout", config.seed)
    named = source.folder_name() if isinstance(source, NamedTaskSource) else ""
    return RunFiles(config.run_path).evaluation / _safe(who) / _safe(named or config.environment.name)


def keep(result: EvaluationResult, made: Path, folder: Path) -> None:
    """Write page and JSON to `made`, where the task source's own files are, and move all of them to `folder`.

    The JSON lists their names (`files`). made: a folder on the same file system.
    """
    names = _in_order({path.name for path in made.iterdir()} | {RESULT, PAGE})
    row = {**result.as_dict(), "files": names}
    (made / RESULT).write_text(json.dumps(finite(row), indent=1, allow_nan=False), encoding="utf-8")
    (made / PAGE).write_text(describe(result), encoding="utf-8")
    _set_aside(folder, names)
    for name in names:
        os.replace(made / name, folder / name)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"


def _set_aside(folder: Path, names: Sequence[str]) -> None:
    """Move the results that lie in `folder`, and whatever else has one of `names`, to `earlier/<n>/`."""
    there = [name for name in _in_order({*_listed(folder / RESULT), *names}) if (folder / name).exists()]
    if not there:
        return
    aside = next(path for n in count(1) if not (path := folder / EARLIER / str(n)).exists())
    aside.mkdir(parents=True)
    for name in there:
        os.replace(folder / name, aside / name)
    logger.info("the results that lay in %s (%s) are in %s now", folder, ", ".join(there), aside)


def _in_order(names: set[str]) -> list[str]:
    """The list that says which files belong together moves last: whoever is stopped in between finds it again."""
    return [*sorted(names - {RESULT}), RESULT]


def _listed(path: Path) -> list[str]:
    """The files that a result says belong to it; none where it cannot be read."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return []
    return [Path(name).name for name in files]
