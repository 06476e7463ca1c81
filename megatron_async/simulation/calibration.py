"""From the folders of runs to a scenario that behaves like them.

Invariants: every number is measured or fitted to measurements of those runs, or stays at the default that its field
documents.

How the engine's speed is found: each trajectory records the seconds it waited for the engine. Without pauses these are,
with n sampled tokens in T turns, k requests running on average and the trainer busy for the share f of them,

    (1 + interference f) (step_base n + step_per_request n k) + request_seconds T

The trainer's is found alike, with f the share of an update in which the engines work. One asynchronous run in which
they always do cannot tell how long an update takes alone; a second one without overlap (bound 0) can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from megatron_async.simulation.fits import INTERFERENCES, Samples, fit_slowdown
from megatron_async.simulation.loop import simulate
from megatron_async.simulation.measured import Cumulative, Measured, measure
from megatron_async.simulation.scenario import (
    SOURCES,
    EngineModel,
    OldLogitModel,
    PublishModel,
    RolloutPolicy,
    Scenario,
    TrainerModel,
)
from megatron_async.simulation.workload import Episode, Workload

_FIT_STEPS, _FIT_ROUNDS = 24, 2
_LEAST_STEP_BASE = 1e-6
"""An engine without any base cost would be infinitely fast when it runs a single request."""
_LEAST_SPREAD = 0.15
"""Standard deviation of the engines' share in updates, below which it says nothing about the trainer's interference."""
_LONGEST_TURNAROUND = 10.0
_PUBLISHED = ("publish/seconds", "publish/paused_seconds", "seconds/publish")


def calibrate(*runs: Path, steps: int | None = None) -> Scenario:
    """The scenario of finished (or running) runs; change parts of it with `dataclasses.replace` to ask what if.

    runs: of the same model and workload on the same machines; settings are the first one's. steps: only the first so
    many of each are looked at, and what was finished by then; None: all.
    Raises UserError when a folder holds too little: fewer than five steps, or no trajectory.
    """
    measured = [measure(path, steps) for path in runs]
    engines = fit_engines(measured)
    trainer = fit_trainer(measured, engines.interference)
    scenario = Scenario(
        workload=_workload(measured),
        engines=engines,
        trainer=trainer,
        publish=_publish(measured, trainer.interference),
        old_logits=_old_logits(measured[0]),
        rollout=_policy(measured[0].config, float(np.mean([run.recording for run in measured]))),
    )
    for _ in range(_FIT_ROUNDS):
        factors = [life_factor(under_settings(scenario, run.config), run.life) for run in measured]
        scenario = replace(scenario, engines=slower(scenario.engines, float(np.mean(factors))))
        found = [fit_turnaround(under_settings(scenario, run.config), run.running) for run in measured]
        scenario = replace(scenario, rollout=replace(scenario.rollout, turnaround=float(np.mean(found))))
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


# ---------------------------------------------------------------- rollout


def _workload(runs: Sequence[Measured]) -> Workload:
    groups: dict[tuple[int, str], list[Episode]] = {}
    for number, run in enumerate(runs):
        for one in run.observed:
            groups.setdefault((number, one.group), []).append(one.episode)
    return Workload(tuple(tuple(members) for members in groups.values()))


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


def life_factor(scenario: Scenario, seconds: float) -> float:
    """By what its engines' times must be multiplied for an episode to live `seconds` on average.

    The fit by trajectory takes the load averaged over a trajectory's life, though it makes most of its tokens while the
    load is low; what that leaves is a common factor.
    """
    result = simulate(scenario, steps=_FIT_STEPS)
    return seconds / (result.episodes_running * result.step_seconds / scenario.rollout.batch)  # Little's law


def slower(engines: EngineModel, factor: float) -> EngineModel:
    """All that a request takes, times `factor`."""
    return replace(
        engines,
        step_base=factor * engines.step_base,
        step_per_request=factor * engines.step_per_request,
        request_seconds=factor * engines.request_seconds,
    )


def fit_turnaround(scenario: Scenario, running: float) -> float:
    """The turnaround at which as many episodes run as were measured (0 where even that is too few).

    It is the one number that no file of a run holds; bisection over simulations, as more of it is fewer episodes.
    """

    def episodes(seconds: float) -> float:
        tried = replace(scenario, rollout=replace(scenario.rollout, turnaround=seconds))
        return simulate(tried, steps=_FIT_STEPS).episodes_running

    low, high = 0.0, 0.05
    if not running or episodes(low) <= running:
        return low
    while episodes(high) > running and high < _LONGEST_TURNAROUND:
        low, high = high, 2 * high
    middle = high
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if episodes(middle) > running else (low, middle)
    return middle


# ---------------------------------------------------------------- engines


def fit_engines(runs: Sequence[Measured]) -> EngineModel:
    """Speed of the engines, and how the trainer slows them down."""
    samples, alive = zip(*map(_engine_samples, runs), strict=True)
    (base, per_request, request), interference = fit_slowdown(samples)
    # An episode that is not being decoded (request sent or answered, tool at work) does not load the engine: of the
    # episodes counted as running, only this share did.
    with_engine = sum(float((s.seconds - request * s.steady[:, 0]).sum()) for s in samples)
    return EngineModel(
        runs[0].config.engines.count,
        max(float(base), _LEAST_STEP_BASE),
        float(per_request) / max(with_engine / sum(alive), 0.1),
        request_seconds=float(request),
        interference=interference,
    )


def _engine_samples(run: Measured) -> tuple[Samples, float]:
    """By trajectory: tokens sampled, these times the requests that ran on its engine (mean), and turns explain the
    seconds that it waited for the engine, pauses left out. Beside them the seconds of all lives, without pauses."""
    starts = np.array([one.start for one in run.observed])
    ends = np.array([one.end for one in run.observed])
    life = np.maximum(ends - starts, 1e-9)
    running = Cumulative(list(zip(starts, ends, strict=True))).over(starts, ends) / life / run.config.engines.count
    paused = run.pauses().over(starts, ends)
    tokens = np.array([one.episode.actions for one in run.observed], dtype=float)
    turns = np.array([len(one.episode.turns) for one in run.observed], dtype=float)
    samples = Samples(
        slowed=np.stack([tokens, tokens * running], axis=1),
        steady=turns[:, None],
        share=np.clip((run.computing().over(starts, ends) - paused) / life, 0.0, 1.0),
        seconds=np.maximum(np.array([one.engine_seconds for one in run.observed]) - paused, 1e-6),
    )
    return samples, float((life - paused).sum())


# ---------------------------------------------------------------- trainer


def fit_trainer(runs: Sequence[Measured], interference: float) -> TrainerModel:
    """interference: the engines', taken for the trainer's where the runs cannot tell."""
    samples = [_update_samples(run) for run in runs]
    share = np.concatenate([run.share for run in samples])
    if not len(share):
        raise UserError(
            "no step of the run was an update (no batch had a signal); calibrate from another run"
        )
    tried = INTERFERENCES if share.std() >= _LEAST_SPREAD else np.array([interference])
    coefficients, interference = fit_slowdown(samples, tried)
    fixed, per_token = (float(value) for value in coefficients)
    trained = [row["batch/trained"] / row["batch/trajectories"] for run in runs for row in run.rows]
    return TrainerModel(
        nodes=runs[0].config.trainer.nodes,
        update_fixed=fixed,
        update_per_token=per_token,
        forward_share=_forward_share(runs, per_token, interference),
        trained_share=float(np.mean(trained)),
        overhead=_overhead(runs, interference),
        poll=_trainer_poll(runs[0].config),
        interference=interference,
    )


def _update_samples(run: Measured) -> Samples:
    """By update: a constant and the tokens trained per node explain its seconds."""
    rows = [row for row in run.rows if row.get("seconds/update") and row["batch/trained"]]
    tokens = [row["batch/tokens"] * row["batch/trained"] / row["batch/trajectories"] for row in rows]
    return Samples(
        slowed=np.array([(1.0, count / run.config.trainer.nodes) for count in tokens]).reshape(-1, 2),
        steady=np.empty((len(rows), 0)),
        share=run.beside_stage("update", rows) if rows else np.empty(0),
        seconds=np.array([row["seconds/update"] for row in rows]),
    )


def _overhead(runs: Sequence[Measured], interference: float) -> float:
    """Seconds between two steps, alone."""
    alone = [
        (end - start) / (1 + interference * share)
        for run in runs
        for (start, end), share in zip(run.gaps, run.beside(run.gaps), strict=True)
    ]
    return float(np.mean(alone))


def _trainer_poll(config: RunConfig) -> float:
    """Seconds between the trainer's looks at the bank."""
    return config.rollout.poll_s / 2


def _forward_share(runs: Sequence[Measured], per_token: float, interference: float) -> float:
    """Forward-only pass against update, per token, where a run made such passes; else the default (a third)."""
    seconds = tokens = 0.0
    for run in runs:
        rows = [row for row in run.rows if row.get("old_logits/forward_tokens")]
        shares = run.beside_stage("old_logits", rows) if rows else np.empty(0)
        for row, share in zip(rows, shares, strict=True):
            seconds += row.get("seconds/old_logits/forward", 0.0) / (1 + interference * share)
            tokens += row["old_logits/forward_tokens"] / run.config.trainer.nodes
    return seconds / tokens / per_token if seconds and per_token else TrainerModel().forward_share


def _publish(runs: Sequence[Measured], interference: float) -> PublishModel:
    config = runs[0].config
    model = PublishModel(every=config.publish.every, retract=_retracts(config))
    paused, alone = [], []
    for run in runs:
        rows = [row for row in run.rows if all(row.get(name) is not None for name in _PUBLISHED)]
        shares = run.beside_stage("publish", rows) if rows else np.empty(0)
        for row, share in zip(rows, shares, strict=True):
            paused.append(row["publish/paused_seconds"])
            alone.append(max(0.0, row["seconds/publish"] - paused[-1]) / (1 + interference * share))
    if not paused:
        return model
    still = float(np.mean(paused))
    return replace(model, seconds=still + float(np.mean(alone)), paused=still)


def _retracts(config: RunConfig) -> bool:
    return config.publish.pause_mode == "retract"


def _old_logits(run: Measured) -> OldLogitModel:
    rows: Sequence[dict[str, Any]] = run.rows
    source = run.config.old_logits.source
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
