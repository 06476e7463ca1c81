"""What a sweep consists of: configurations x seeds, read from YAML (docs/sweeps.md).

Invariants: a run's identity is a digest of everything that decides its outcome (resolved configuration, warm start,
seed) and of nothing else, so that renaming or moving a sweep repeats no run and any change of an option does; runs come
seed by seed, so that a sweep cut short has compared all configurations on the seeds it reached.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_async.config import ConfigError, RunConfig, check, from_dict
from megatron_async.config.loader import apply_override, assign, parse_yaml, read_file
from megatron_async.config.typed import build, to_plain

MADE_HERE = "tiny"
"""Value of `warm_start.model` that stands for a new tiny checkpoint for every seed."""

_CHECKPOINT = "to be made by the warm start"


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The common start of all runs of a seed. Without a `config` runs start from the base's own `model.path`."""

    config: str = ""
    """Configuration of the supervised warm start (command sft)."""
    model: str = MADE_HERE
    """Checkpoint it starts from; "tiny": a new tiny one for every seed."""
    set: dict[str, Any] = field(default_factory=dict)
    """Options to override in it, by dotted key."""


@dataclass(frozen=True, slots=True)
class Against:
    """A figure of measures against an axis whose values are numbers."""

    axis: str = ""
    measures: tuple[str, ...] = ("active",)


@dataclass(frozen=True, slots=True)
class Plots:
    """Figures of the report."""

    curves: tuple[str, ...] = ("reward/mean",)
    """Metrics drawn by training step, a line with its spread over seeds for each configuration."""
    against: Against = Against()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep file."""

    name: str
    base: str
    """Configuration that all runs share."""
    seeds: tuple[int, ...]
    vary: dict[str, dict[str, dict[str, Any]]]
    """axis -> value -> options by dotted key; every combination of values is run on every seed."""
    set: dict[str, Any] = field(default_factory=dict)
    """Options of all runs by dotted key, on top of the base."""
    warm_start: WarmStart = WarmStart()
    plots: Plots = field(default_factory=Plots)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the main job. config: complete but for the path of the warm start's checkpoint."""

    identity: str
    values: Mapping[str, str]
    seed: int
    config: RunConfig
    warm_start: RunConfig | None

    @property
    def label(self) -> str:
        """The values of its axes, such as "lag 3, anchor ewma"."""
        if len(self.values) == 1:
            return next(iter(self.values.values()))
        return ", ".join(f"{axis} {value}" for axis, value in self.values.items())

    @property
    def folder(self) -> str:
        """Name of its folder: readable, and another one for another configuration."""
        words = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", value) for value in self.values.values())
        return f"{words}-seed{self.seed}-{self.identity[:8]}"


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file with `KEY=VALUE` overrides of its own keys; raises ConfigError with every problem."""
    if not path.is_file():
        raise ConfigError([f"{path}: no such file; sweeps are in recipes/sweeps"])
    data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(data, dict):
        raise ConfigError([f"expected a mapping, got {data!r}"], str(path))
    for override in overrides:
        apply_override(data, override)
    sweep = build(Sweep, data, str(path))
    problems = [f"vary.{axis}: has no values" for axis, values in sweep.vary.items() if not values]
    if not sweep.seeds or len(set(sweep.seeds)) != len(sweep.seeds):
        problems.append(f"seeds: {list(sweep.seeds)} must be different numbers, at least one")
    axis = sweep.plots.against.axis
    if axis and axis not in sweep.vary:
        problems.append(f"plots.against.axis: {axis!r} is not varied; vary has {', '.join(sweep.vary)}")
    if problems:
        raise ConfigError(problems, str(path))
    return sweep


def plan(sweep: Sweep, folder: Path) -> list[Run]:
    """All runs, seed by seed. folder: of the sweep; run folders go under it.

    Raises ConfigError for a run whose configuration is not valid, naming it, before anything was started.
    """
    base = _read(sweep.base)
    for key, value in sweep.set.items():
        assign(base, key, copy.deepcopy(value), "set")
    names = list(sweep.vary)
    combinations = list(itertools.product(*(sweep.vary[name] for name in names)))
    runs, problems = [], []
    for seed in sweep.seeds:
        warm = _warm_start_config(sweep, folder, seed)
        for combination in combinations:
            values = dict(zip(names, combination, strict=True))
            try:
                runs.append(_run(sweep, base, values, seed, warm, folder))
            except ConfigError as error:
                problems += [f"{', '.join(combination)}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), sweep.name)
    return runs


def _run(
    sweep: Sweep,
    base: dict[str, Any],
    values: dict[str, str],
    seed: int,
    warm: RunConfig | None,
    folder: Path,
) -> Run:
    data = copy.deepcopy(base)
    for axis, value in values.items():
        for key, option in sweep.vary[axis][value].items():
            assign(data, key, copy.deepcopy(option), f"vary.{axis}.{value}")
    data |= {"name": "run", "run_dir": str(folder / "runs"), "seed": seed}
    if warm is not None:
        assign(data, "model.path", _CHECKPOINT, "warm_start")
    config = from_dict(data)
    _check(config, made_later=warm is not None)
    run = Run(_identity(config, warm), values, seed, config, warm)
    return replace(run, config=replace(config, name=run.folder))


def _check(config: RunConfig, *, made_later: bool) -> None:
    try:
        check(config)
    except ConfigError as error:
        problems = [text for text in error.problems if not (made_later and text.startswith("model.path:"))]
        if problems:
            raise ConfigError(problems) from error


def _warm_start_config(sweep: Sweep, folder: Path, seed: int) -> RunConfig | None:
    warm = sweep.warm_start
    if not warm.config:
        return None
    data = _read(warm.config)
    for key, value in warm.set.items():
        assign(data, key, copy.deepcopy(value), "warm_start.set")
    data |= {"name": "warm_start", "run_dir": str(folder / "warm_starts"), "seed": seed}
    assign(data, "model.path", warm.model, "warm_start.model")
    config = from_dict(data, warm.config)
    return replace(config, name=f"seed{seed}-{_identity(config, None)[:8]}")


def _read(path: str) -> dict[str, Any]:
    return read_file(Path(path))


def _identity(config: RunConfig, warm: RunConfig | None) -> str:
    """Hex digest of what decides the outcome; not names, places, displays."""
    plain = to_plain(config)
    for key in ("name", "run_dir", "observe", "bank"):
        del plain[key]
    start = plain["model"].pop("path") if warm is None else _identity(warm, None)
    text = json.dumps({"config": plain, "start": start}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
