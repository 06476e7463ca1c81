"""From a run's folder to a scenario that behaves like it.

Read are the configuration, metrics.jsonl, timeline.jsonl and the trajectories in the bank. Invariants: every number is
measured or fitted to measurements of that run, or stays at the default that its field documents; nothing in the folder
is changed.

How the engine's speed is found: each trajectory records the seconds it waited for the engine. Without pauses these are,
with n sampled tokens in T turns, k requests running on average and the trainer busy for the share f of them,

    (1 + interference f) (step_base n + step_per_request n k) + request_seconds T

which is linear in all but the interference: non-negative least squares for each value of a grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_async import config as configuration
from megatron_async.bank import viewing
from megatron_async.bank.dialects import make_engine
from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles, read_metrics
from megatron_async.observe.timeline import Interval, read_timeline
from megatron_async.passwords import hide_password
from megatron_async.simulation.loop import simulate
from megatron_async.simulation.scenario import (
    SOURCES,
    EngineModel,
    OldLogitModel,
    PublishModel,
    RolloutPolicy,
    Scenario,
    TrainerModel,
)
from megatron_async.simulation.workload import Episode, Turn, Workload
from megatron_async.trajectory import Trajectory

Array = NDArray[np.float64]

SKIPPED_STEPS = 2
"""First steps of a run that are left out: compilation, cold caches, empty queues."""

MOST_TRAJECTORIES = 4000
_COMPUTING = ("old_logits", "update", "capture", "publish")
_FIT_STEPS, _FIT_ROUNDS = 24, 2
_LEAST_STEP_BASE = 1e-6
"""An engine without any base cost would be infinitely fast when it runs a single request."""
_LONGEST_TURNAROUND = 10.0
_INTERFERENCES = np.linspace(0.0, 2.0, 41)


@dataclass(frozen=True, slots=True)
class Observed:
    """A finished trajectory: its shape, and when it was with the engine (Unix seconds)."""

    group: str
    episode: Episode
    start: float
    end: float
    engine_seconds: float


class Cumulative:
    """Integral over time of how many of some intervals are open; `over(starts, ends)` gives it between two times."""

    def __init__(self, intervals: Sequence[tuple[float, float]]) -> None:
        starts, ends = (np.array(side, dtype=float) for side in zip(*intervals, strict=True))
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


def read_config(run_path: Path) -> RunConfig:
    """The configuration of a run's folder, wherever that was moved. Raises UserError when it is none."""
    if not RunFiles(run_path).config.is_file():
        raise UserError(f"{run_path} is not the folder of a run (it has no config.yaml)")
    config = configuration.load(RunFiles(run_path).config)
    return replace(config, run_dir=str(run_path.parent), name=run_path.name)


def calibrate(run_path: Path, steps: int | None = None) -> Scenario:
    """The scenario of a finished (or running) run; change parts of it with `dataclasses.replace` to ask what if.

    steps: only the first so many of the run are looked at, and what was finished by then; None: all of it.
    Raises UserError when the folder holds too little: fewer than five steps, or no trajectory.
    """
    config = read_config(run_path)
    rows = read_metrics(run_path)[:steps][SKIPPED_STEPS:]
    if len(rows) < 3:
        raise UserError(f"{run_path}: {len(rows) + SKIPPED_STEPS} steps are too few; calibration needs at least five")
    since, until = rows[0]["time"] - rows[0]["seconds/step"], rows[-1]["time"]
    recording = recording_seconds(config, run_path, until)
    observed = read_observed(config, since, until, recording)
    timeline = [i for i in read_timeline(run_path) if i.part == "trainer" and i.end <= until]
    engines, interference = fit_engines(config, observed, timeline, rows)
    busy = _engines_busy(observed, timeline)
    scenario = Scenario(
        workload=_workload(observed),
        engines=engines,
        trainer=fit_trainer(config, rows, 1 + interference * busy),
        publish=_publish(config, rows, 1 + interference * busy),
        old_logits=_old_logits(config, rows),
        rollout=_policy(config, recording),
        interference=interference,
    )
    life = float(np.mean([one.end - one.start for one in observed]))
    for _ in range(_FIT_ROUNDS):
        scenario = fit_turnaround(fit_life(scenario, life), episodes_running(run_path, rows))
    return scenario


def under_settings(model: Scenario, config: RunConfig) -> Scenario:
    """`model` as it would run with another run's own settings; nothing that was measured there is taken."""
    policy = replace(_policy(config, model.rollout.recording), turnaround=model.rollout.turnaround)
    publish = replace(model.publish, every=config.publish.every, retract=_retracts(config))
    return replace(
        model,
        engines=replace(model.engines, count=config.engines.count),
        trainer=replace(model.trainer, nodes=config.trainer.nodes, poll=_trainer_poll(config)),
        rollout=policy,
        publish=publish,
    )


# ---------------------------------------------------------------- what the agents did


def read_observed(config: RunConfig, since: float, until: float, recording: float) -> list[Observed]:
    """Trainable trajectories recorded between two times (Unix seconds), newest first; each ended `recording` seconds
    before."""
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


def _workload(observed: Sequence[Observed]) -> Workload:
    groups: dict[str, list[Episode]] = {}
    for one in observed:
        groups.setdefault(one.group, []).append(one.episode)
    return Workload(tuple(tuple(members) for members in groups.values()))


def recording_seconds(config: RunConfig, run_path: Path, until: float) -> float:
    """From the end of an episode to its being in the bank, mean over those that ended by `until`; 0 where the timeline
    has no episodes.

    Episodes carry no id on the timeline; they are recorded in the order in which they end, so times pair in order.
    """
    ends = sorted(i.end for i in read_timeline(run_path) if i.stage == "episode" and i.end <= until)
    engine = make_engine(config.bank_url)
    recorded = viewing.finish_times(engine)
    engine.dispose()
    pairs = [at - end for at, end in zip(recorded, ends, strict=False)]
    return max(0.0, float(np.mean(pairs))) if pairs else 0.0


def _policy(config: RunConfig, recording: float) -> RolloutPolicy:
    rollout, batch = config.rollout, config.batch
    return RolloutPolicy(
        bound=rollout.max_staleness,
        admission=rollout.admission,
        window=rollout.window,
        concurrency=rollout.concurrency,
        groups=batch.groups,
        group_size=batch.group_size,
        poll=rollout.poll_s,
        recording=recording,
    )


# ---------------------------------------------------------------- engines


def fit_engines(
    config: RunConfig,
    observed: Sequence[Observed],
    timeline: Sequence[Interval],
    rows: Sequence[dict[str, Any]],
) -> tuple[EngineModel, float]:
    """Speed of the engines, and the interference between them and the trainer."""
    starts = np.array([one.start for one in observed])
    ends = np.array([one.end for one in observed])
    seconds = np.array([one.engine_seconds for one in observed])
    tokens = np.array([one.episode.actions for one in observed], dtype=float)
    turns = np.array([len(one.episode.turns) for one in observed], dtype=float)
    life = np.maximum(ends - starts, 1e-9)
    running = (
        Cumulative(list(zip(starts, ends, strict=True))).over(starts, ends) / life / config.engines.count
    )
    paused = Cumulative(_pauses(timeline, rows)).over(starts, ends)
    computing = Cumulative(_intervals(timeline, _COMPUTING)).over(starts, ends)
    share = np.clip((computing - paused) / life, 0.0, 1.0)
    target = np.maximum(seconds - paused, 1e-6)
    (base, per_request, request), interference = fit_speed(tokens, turns, running, share, target)
    # An episode that is not being decoded (request sent or answered, tool at work) does not load the engine: of the
    # episodes counted as running, only this share did.
    decoding = float((target - request * turns).sum() / (life - paused).sum())
    model = EngineModel(
        config.engines.count,
        max(base, _LEAST_STEP_BASE),
        per_request / max(decoding, 0.1),
        request_seconds=request,
    )
    return model, interference


def fit_speed(
    tokens: Array, turns: Array, running: Array, share: Array, seconds: Array
) -> tuple[tuple[float, float, float], float]:
    """(step_base, step_per_request, request_seconds) and interference that explain `seconds`; see the module.

    One entry per trajectory. running: requests on its engine, mean over its time. share: of its time in which the
    trainer computed.
    """
    best: tuple[float, Array, float] | None = None
    for interference in _INTERFERENCES:
        load = 1 + interference * share
        features = np.stack([tokens * load, tokens * running * load, turns], axis=1)
        coefficients = non_negative_least_squares(features, seconds)
        # Least squares need not meet the mean, which decides throughput.
        coefficients *= seconds.sum() / max((features @ coefficients).sum(), 1e-12)
        error = float(np.sum((features @ coefficients - seconds) ** 2))
        if best is None or error < best[0]:
            best = error, coefficients, float(interference)
    assert best is not None
    base, per_request, request = (float(c) for c in best[1])
    return (base, per_request, request), best[2]


def non_negative_least_squares(features: Array, target: Array) -> Array:
    """argmin |features x - target|² over x >= 0, by trying every set of active columns (there are few columns)."""
    columns = features.shape[1]
    best, best_error = np.zeros(columns), float(target @ target)
    for size in range(1, columns + 1):
        for active in itertools.combinations(range(columns), size):
            solution = np.linalg.lstsq(features[:, active], target, rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(np.sum((features[:, active] @ solution - target) ** 2))
            if error < best_error:
                best, best_error = np.zeros(columns), error
                best[list(active)] = solution
    return best


def _intervals(timeline: Sequence[Interval], stages: Sequence[str]) -> list[tuple[float, float]]:
    return [(i.start, i.end) for i in timeline if i.stage in stages] or [(0.0, 0.0)]


def _pauses(timeline: Sequence[Interval], rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """When the engines stood still: the end of each publishing."""
    paused = {row["step"]: row.get("publish/paused_seconds", 0.0) for row in rows}
    return [
        (i.end - paused[i.step], i.end) for i in timeline if i.stage == "publish" and paused.get(i.step)
    ] or [(0.0, 0.0)]


def _engines_busy(observed: Sequence[Observed], timeline: Sequence[Interval]) -> float:
    """Share of the trainer's computing time in which at least one trajectory is with an engine."""
    events = sorted([(one.start, 1) for one in observed] + [(one.end, -1) for one in observed])
    open_now, since, busy = 0, 0.0, []
    for time, change in events:
        if open_now == 0:
            since = time
        open_now += change
        if open_now == 0:
            busy.append((since, time))
    first, last = events[0][0], events[-1][0]
    spans = [
        (max(a, first), min(b, last)) for a, b in _intervals(timeline, _COMPUTING) if b > first and a < last
    ]
    if not spans:
        return 0.0
    starts, ends = (np.array(side) for side in zip(*spans, strict=True))
    overlap = Cumulative(busy or [(0.0, 0.0)]).over(starts, ends).sum()
    return float(min(1.0, overlap / max((ends - starts).sum(), 1e-9)))


# ---------------------------------------------------------------- rollout


def episodes_running(run_path: Path, rows: Sequence[dict[str, Any]]) -> float:
    """Episodes running, mean over the time of `rows`; 0 where the timeline has none."""
    episodes = [(i.start, i.end) for i in read_timeline(run_path) if i.stage == "episode"]
    if not episodes:
        return 0.0
    start, end = np.array([rows[0]["time"]]), np.array([rows[-1]["time"]])
    return float(Cumulative(episodes).over(start, end)[0] / (end - start)[0])


def fit_life(scenario: Scenario, seconds: float) -> Scenario:
    """`scenario` with its engines' times scaled so that an episode lives `seconds` on average.

    The fit by trajectory takes the load averaged over a trajectory's life, though it makes most of its tokens while the
    load is low; what that leaves is a common factor.
    """
    result = simulate(scenario, steps=_FIT_STEPS)
    simulated = result.episodes_running * result.step_seconds / scenario.rollout.batch  # Little's law
    factor, engines = seconds / simulated, scenario.engines
    return replace(
        scenario,
        engines=replace(
            engines,
            step_base=factor * engines.step_base,
            step_per_request=factor * engines.step_per_request,
            request_seconds=factor * engines.request_seconds,
        ),
    )


def fit_turnaround(scenario: Scenario, running: float) -> Scenario:
    """`scenario` with the turnaround at which as many episodes run as were measured (0 where even that is too few).

    It is the one number that no file of a run holds; bisection over simulations, as more of it is fewer episodes.
    """

    def attempt(seconds: float) -> tuple[Scenario, float]:
        tried = replace(scenario, rollout=replace(scenario.rollout, turnaround=seconds))
        return tried, simulate(tried, steps=_FIT_STEPS).episodes_running

    low, high = 0.0, 0.05
    fitted, most = attempt(low)
    if not running or most <= running:
        return fitted
    while attempt(high)[1] > running and high < _LONGEST_TURNAROUND:
        low, high = high, 2 * high
    for _ in range(6):
        middle = (low + high) / 2
        fitted, found = attempt(middle)
        low, high = (middle, high) if found > running else (low, middle)
    return fitted


# ---------------------------------------------------------------- trainer


def fit_trainer(config: RunConfig, rows: Sequence[dict[str, Any]], load: float) -> TrainerModel:
    """load: factor by which the engines slowed the trainer down while it was measured."""
    updated = [row for row in rows if row.get("seconds/update") and row["batch/trained"]]
    if not updated:
        raise UserError(
            "no step of the run was an update (no batch had a signal); calibrate from another run"
        )
    shares = np.array([row["batch/trained"] / row["batch/trajectories"] for row in rows])
    tokens = np.array(
        [row["batch/tokens"] * row["batch/trained"] / row["batch/trajectories"] for row in updated]
    )
    seconds = np.array([row["seconds/update"] for row in updated]) / load
    features = np.stack([np.ones_like(tokens), tokens], axis=1)
    fixed, per_token = (float(c) for c in non_negative_least_squares(features, seconds))
    times = np.array([row["time"] for row in rows])
    own = np.array([row["seconds/step"] for row in rows])
    return TrainerModel(
        nodes=config.trainer.nodes,
        update_fixed=fixed,
        update_per_token=per_token * config.trainer.nodes,
        forward_share=_forward_share(rows, per_token),
        trained_share=float(shares.mean()),
        overhead=float(np.maximum(np.diff(times) - own[1:], 0.0).mean()),
        poll=_trainer_poll(config),
    )


def _trainer_poll(config: RunConfig) -> float:
    """Seconds between the trainer's looks at the bank."""
    return config.rollout.poll_s / 2


def _forward_share(rows: Sequence[dict[str, Any]], per_token: float) -> float:
    """Forward-only pass against update, per token, where the run made such passes; else the default (a third)."""
    pairs = [
        (row["seconds/old_logits/forward"], row["old_logits/forward_tokens"])
        for row in rows
        if row.get("seconds/old_logits/forward") and row.get("old_logits/forward_tokens")
    ]
    if not pairs or not per_token:
        return TrainerModel().forward_share
    return sum(seconds for seconds, _ in pairs) / sum(tokens for _, tokens in pairs) / per_token


def _publish(config: RunConfig, rows: Sequence[dict[str, Any]], load: float) -> PublishModel:
    published = [row for row in rows if row.get("publish/seconds")]
    if not published:
        return PublishModel(every=config.publish.every)
    paused = float(np.mean([row["publish/paused_seconds"] for row in published]))
    whole = float(np.mean([row["seconds/publish"] for row in published]))
    return PublishModel(
        seconds=paused + max(0.0, whole - paused) / load,
        paused=paused,
        every=config.publish.every,
        retract=_retracts(config),
    )


def _retracts(config: RunConfig) -> bool:
    return config.publish.pause_mode == "retract"


def _old_logits(config: RunConfig, rows: Sequence[dict[str, Any]]) -> OldLogitModel:
    source = config.old_logits.source
    kind = {"linear": "rollout", "loglinear": "rollout", "snapshot_full": "snapshot"}.get(source, source)
    if kind == "start" and any(row.get("seconds/old_logits/forward") for row in rows):
        kind = "start_pass"
    if kind not in SOURCES:
        raise UserError(f"old_logits.source {source!r} has no cost model; it knows {', '.join(SOURCES)}")
    steps = sum(row.get("old_logits/steps", 0.0) for row in rows)
    travel = sum(
        row.get("seconds/old_logits/travel", 0.0) + row.get("seconds/old_logits/restore", 0.0) for row in rows
    )
    return OldLogitModel(
        source=kind,
        capture=float(np.mean([row.get("seconds/capture", 0.0) for row in rows])),
        travel=travel / steps / 2 if steps else 0.0,
        switch=float(np.mean([row.get("seconds/old_logits/switch", 0.0) for row in rows])) / 2,
    )
