"""What the folder of a run holds that a scenario is made of: settings, steps, the trainer's timeline, trajectories.

Invariants: nothing in a folder is changed; times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron_async import config as configuration
from megatron_async.bank import viewing
from megatron_async.bank.dialects import make_engine
from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles
from megatron_async.observe.timeline import Interval, read_timeline
from megatron_async.passwords import hide_password
from megatron_async.simulation.fits import Array
from megatron_async.simulation.steps import SKIPPED_STEPS, TIMES, read_steps
from megatron_async.simulation.workload import Episode, Turn
from megatron_async.trajectory import Trajectory

MOST_TRAJECTORIES = 4000
_NEEDED = ("batch/tokens", "batch/trained", "batch/trajectories")
_COMPUTING = ("old_logits", "update", "capture", "publish")


class Cumulative:
    """Integral over time of how many of some intervals are open; `over(starts, ends)` gives it between two times."""

    def __init__(self, intervals: Sequence[tuple[float, float]]) -> None:
        starts, ends = (np.array(side, dtype=float) for side in zip(*intervals or [(0.0, 0.0)], strict=True))
        times = np.concatenate([starts, ends])
        changes = np.concatenate([np.ones_like(starts), -np.ones_like(ends)])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        open_after = np.cumsum(changes[order])
        self._integral = np.concatenate([[0.0], np.cumsum(open_after[:-1] * np.diff(self._times))])

    def over(self, starts: Array, ends: Array) -> Array:
        """Interval-seconds between `starts` and `ends`."""
        return cast(
            Array,
            np.interp(ends, self._times, self._integral) - np.interp(starts, self._times, self._integral),
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """A finished trajectory: its shape, and when it was with the engine."""

    group: str
    episode: Episode
    start: float
    end: float
    engine_seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. rows: metrics of the steps that count. observed: what finished during them. trainer: its timeline.
    recording: seconds from an episode's end to its being in the bank. running: episodes at once, mean; 0: unknown."""

    config: RunConfig
    rows: Sequence[dict[str, Any]]
    observed: Sequence[Observed]
    trainer: Sequence[Interval]
    recording: float
    running: float

    @property
    def life(self) -> float:
        """Seconds of an episode, mean."""
        return float(np.mean([one.end - one.start for one in self.observed]))

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Between the end of each step's stages and the next step's first (commit, metrics)."""
        pairs = zip(self.rows, self.rows[1:], strict=False)
        return [(a["time"], max(a["time"], b["time"] - b["seconds/step"])) for a, b in pairs]

    def computing(self) -> Cumulative:
        """When the trainer computed."""
        return Cumulative([(i.start, i.end) for i in self.trainer if i.stage in _COMPUTING])

    def pauses(self) -> Cumulative:
        """When the engines stood still: the end of each publishing."""
        paused = {row["step"]: row.get("publish/paused_seconds") or 0.0 for row in self.rows}
        return Cumulative(
            [(i.end - paused[i.step], i.end) for i in self.trainer if i.stage == "publish" and paused.get(i.step)]
        )

    def beside(self, spans: Sequence[tuple[float, float]]) -> Array:
        """Share of each span in which at least one trajectory is with an engine."""
        starts, ends = (np.array(side, dtype=float) for side in zip(*spans, strict=True))
        at_work = Cumulative(union([(one.start, one.end) for one in self.observed]))
        shares: Array = at_work.over(starts, ends) / np.maximum(ends - starts, 1e-9)
        return shares

    def beside_stage(self, stage: str, rows: Sequence[dict[str, Any]]) -> Array:
        """The same of a stage in each of some steps; 0 where the timeline lacks it."""
        spans = {i.step: (i.start, i.end) for i in self.trainer if i.stage == stage}
        return self.beside([spans.get(row["step"], (0.0, 0.0)) for row in rows])


def union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times in intervals that do not overlap, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def measure(run_path: Path, steps: int | None = None) -> Measured:
    """A finished or running run; of one that was stopped and resumed, its longest stretch without a stop. steps: only
    the first so many are looked at, and what was finished by then.

    Raises UserError when the folder holds too little: fewer than five steps in a row, or no trajectory.
    """
    config = read_config(run_path)
    stretch = read_steps(run_path, SKIPPED_STEPS, steps, (*TIMES, *_NEEDED))
    rows = stretch.rows
    if len(rows) < 3:
        raise UserError(
            f"{run_path}: its longest stretch without a stop has {len(rows)} steps behind the first {SKIPPED_STEPS}; "
            "calibration needs at least five in a row"
        )
    since, until = rows[0]["time"] - rows[0]["seconds/step"], rows[-1]["time"]
    timeline = read_timeline(run_path)
    episodes = [(i.start, i.end) for i in timeline if i.stage == "episode"]
    ends = [end for _, end in episodes if stretch.since <= end <= until]
    recording = recording_seconds(config, ends, stretch.since)
    window = np.array([rows[0]["time"]]), np.array([until])
    return Measured(
        config=config,
        rows=rows,
        observed=read_observed(config, since, until, recording),
        trainer=[i for i in timeline if i.part == "trainer" and i.end <= until],
        recording=recording,
        running=float(Cumulative(episodes).over(*window)[0] / (until - rows[0]["time"])),
    )


def read_config(run_path: Path) -> RunConfig:
    """The configuration of a run's folder, wherever that was moved. Raises UserError when it is none."""
    if not RunFiles(run_path).config.is_file():
        raise UserError(f"{run_path} is not the folder of a run (it has no config.yaml)")
    config = configuration.load(RunFiles(run_path).config)
    return replace(config, run_dir=str(run_path.parent), name=run_path.name)


def read_observed(config: RunConfig, since: float, until: float, recording: float) -> list[Observed]:
    """Trainable trajectories recorded between two times, newest first; each ended `recording` seconds before."""
    engine = make_engine(config.bank_url)
    found = viewing.finished(engine, MOST_TRAJECTORIES)
    engine.dispose()
    observed = [
        _observed(row.trajectory, row.finished_at - recording)
        for row in found
        if since <= row.finished_at <= until
    ]
    if not observed:
        raise UserError(f"the bank at {hide_password(config.bank_url)} holds no finished trajectory to calibrate from")
    return observed


def _observed(trajectory: Trajectory, end: float) -> Observed:
    engine, tools = float(trajectory.info["engine_s"]), float(trajectory.info["environment_s"])
    turns, at = [], 0
    for turn in trajectory.turns:
        turns.append(Turn(turn.start - at, turn.end - turn.start, tools / len(trajectory.turns)))
        at = turn.end
    return Observed(trajectory.group_id, Episode(tuple(turns)), end - engine - tools, end, engine)


def recording_seconds(config: RunConfig, ends: Sequence[float], since: float) -> float:
    """From the end of an episode to its being in the bank, mean; 0 where no `ends` are known. since: before all.

    Episodes carry no id on the timeline; they are recorded in the order in which they end, so times pair in order, from
    a time on at which none ran: a stop cuts episodes that are on the timeline and were not recorded.
    """
    engine = make_engine(config.bank_url)
    recorded = [at for at in viewing.finish_times(engine) if at >= since]
    engine.dispose()
    pairs = [at - end for at, end in zip(recorded, sorted(ends), strict=False)]
    return max(0.0, float(np.mean(pairs))) if pairs else 0.0
