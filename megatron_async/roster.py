"""The engines of a run and what each may be used for: `engines.json` in the run's folder.

The launcher writes it, everybody else reads it. Invariants: a reader never sees half a file; an engine that was started
anew is another one (`incarnation`); it is `serving` only once it holds the version that was last published, so whoever
sends requests to serving engines alone never samples from weights that are older than that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_async.errors import UserError

SERVING = "serving"
LATE = "late"
"""It answers, but does not hold the published version yet: the trainer publishes to it, nobody samples from it."""

DRAINING = "draining"
"""It ends what runs on it, to be published to afterwards: nobody sends it anything new."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine that answers. index: its number in the run; incarnation: how often it was started again."""

    index: int
    url: str
    incarnation: int = 0
    state: str = SERVING

    @property
    def name(self) -> str:
        return f"{self.index}.{self.incarnation}"

    @property
    def serves(self) -> bool:
        return self.state == SERVING


def roster_file(run_path: Path) -> Path:
    return run_path / "engines.json"


def write_roster(run_path: Path, engines: Iterable[Engine], router: str = "") -> None:
    """Replace the roster. router: address of the router in front of the engines; empty where there is none."""
    path = roster_file(run_path)
    values: dict[str, Any] = {"engines": [asdict(engine) for engine in engines]}
    if router:
        values["router"] = router
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(json.dumps(values, indent=1), encoding="utf-8")
    os.replace(fresh, path)


def read_roster(run_path: Path) -> list[Engine]:
    """Every engine that answers. Raises UserError when no engines were started."""
    return [
        Engine(int(e.get("index", i)), str(e["url"]), int(e.get("incarnation", 0)), str(e.get("state", SERVING)))
        for i, e in enumerate(_values(run_path)["engines"])
    ]


def read_router(run_path: Path) -> str:
    """Address of the router in front of the engines; empty where there is none."""
    return str(_values(run_path).get("router", ""))


def _values(run_path: Path) -> dict[str, Any]:
    path = roster_file(run_path)
    if not path.exists():
        raise UserError(f"{path} is missing: start the run with `launch`, or its engines with `serve`, first")
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def failed_key(name: str) -> str:
    """Key of the bank's key-value table under which the trainer says why an engine (by `Engine.name`) is no good."""
    return f"engines/failed/{name}"
