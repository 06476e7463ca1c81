"""Calibration: a run folder written by a loop whose numbers are known gives those numbers back, and predicts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import create_engine, text

from megatron_async.bank import Bank
from megatron_async.config import ConfigError, dump, load
from megatron_async.errors import EXIT_USER_ERROR, UserError
from megatron_async.observe import MetricsWriter, RunFiles, Timeline
from megatron_async.simulation import (
    EngineModel,
    PublishModel,
    RolloutPolicy,
    Scenario,
    TrainerModel,
    Workload,
    calibrate,
    calibration,
    simulate,
)
from megatron_async.simulation.calibration import fit_turnaround, life_factor, slower, under_settings
from megatron_async.simulation.errors import ScenarioError
from megatron_async.simulation.fits import Samples, fit_slowdown, non_negative_least_squares
from megatron_async.simulation.loop import _Loop
from megatron_async.simulation.measured import Cumulative, measure, union
from megatron_async.simulation.playing import Play
from megatron_async.simulation.steps import SKIPPED_STEPS, read_steps
from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan
from tests.unit.configs import write_config
from tools import simulate_async, simulation_checks

EPOCH = 1.7e9
TRUTH = Scenario(
    Workload.parametric(
        turns=3, actions_per_turn=30, actions_spread=0.7, prompt=30, observation=10, tool_seconds=0.2, stock=300, seed=5
    ),
    EngineModel(step_base=0.01, step_per_request=0.002, request_seconds=0.8, interference=0.4),
    TrainerModel(update_fixed=0.4, update_per_token=2e-4, overhead=0.05, poll=0.05, interference=0.4),
    PublishModel(seconds=0.5, paused=0.2, retract=False),
    rollout=RolloutPolicy(bound=2, concurrency=24, groups=6, group_size=4, poll=0.1, recording=0.15, turnaround=0.3),
)  # fmt: skip


class Recorder:
    """Runs a scenario and writes what the real parts would have written."""

    def __init__(self, scenario: Scenario, steps: int) -> None:
        self.loop = _Loop(scenario, 0)
        self.plays: list[tuple[Play, float, float, float, float]] = []  # play, start, end, engine and tool seconds
        self.batches: list[float] = []  # tokens of each, context included
        self._begun: dict[int, float] = {}
        self._tools: dict[int, float] = {}
        players = self.loop.players
        begin, after = players._begin_turn, players._after_tool

        def begin_turn(play: Play, number: int) -> None:
            self._begun.setdefault(id(play), self.loop.clock.now)
            begin(play, number)

        def after_tool(play: Play, number: int) -> None:
            self._tools[id(play)] = self._tools.get(id(play), 0.0) + play.episode.turns[number].tool_seconds
            if number + 1 == len(play.episode.turns):
                start, end, tools = self._begun[id(play)], self.loop.clock.now, self._tools[id(play)]
                self.plays.append((play, start, end, end - start - tools, tools))
            after(play, number)

        players._begin_turn, players._after_tool = begin_turn, after_tool  # type: ignore[method-assign]
        updated = self.loop._updated

        def count_tokens(capture: float) -> None:
            self.batches.append(sum(play.tokens for play in self.loop.step.trained))
            updated(capture)

        self.loop._updated = count_tokens  # type: ignore[method-assign]
        self.loop.run(0, steps)

    def write(self, folder: Path) -> Path:
        scenario = self.loop.scenario
        rollout = scenario.rollout
        config = load(write_config(
            folder,
            batch={"groups": rollout.groups, "group_size": rollout.group_size},
            rollout={"max_staleness": rollout.bound, "concurrency": rollout.concurrency, "max_tokens": 2048},
            objective={"mask_low": 0.5, "mask_high": 2.0},
            publish={"pause_mode": "retract" if scenario.publish.retract else "in_place"},
        ))  # fmt: skip
        files = RunFiles(config.run_path)
        files.root.mkdir(parents=True)
        files.config.write_text(dump(config))
        self._write_steps(files.root)
        self._write_trajectories(config.bank_url)
        return files.root

    def _write_steps(self, root: Path) -> None:
        trainer, size = Timeline(root, "trainer"), self.loop.scenario.rollout.batch
        with MetricsWriter(root) as metrics:
            for number, step in enumerate(self.loop.steps):
                at = EPOCH + step.end - step.seconds
                for stage, seconds in step.stages.items():
                    if stage != "overhead":
                        trainer.record({"wait": "wait_batch"}.get(stage, stage), number, at, at + seconds)
                    at += seconds
                took = trainer.take_seconds()
                metrics.log(number, {
                    "seconds/step": sum(took.values()), **{f"seconds/{stage}": s for stage, s in took.items()},
                    "batch/trajectories": size, "batch/trained": size, "batch/tokens": self.batches[number],
                    "version_gap/mean": sum(g * n for g, n in step.gap_tokens.items()) / step.tokens,
                    "publish/seconds": step.stages["publish"], "publish/paused_seconds": 0.2,
                })  # fmt: skip
        trainer.close()
        self._stamp(root)
        timeline = Timeline(root, "rollout")
        for play, start, end, _, _ in self.plays:
            timeline.record("episode", play.start_version, EPOCH + start, EPOCH + end)
        timeline.close()

    def _stamp(self, root: Path) -> None:
        """MetricsWriter writes the present time; the run was at EPOCH."""
        path = RunFiles(root).metrics
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row, step in zip(rows, self.loop.steps, strict=True):
            row["time"] = EPOCH + step.end
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _write_trajectories(self, url: str) -> None:
        times = {}
        with Bank.open(url) as bank:
            for version in range(1, self.loop.progress.version + 1):
                bank.record_version(version, version - 1)
            for number, (play, start, end, engine, tools) in enumerate(self.plays):
                trajectory = _trajectory(f"t{number}", play, {"engine_s": engine, "environment_s": tools})
                bank.start_trajectory(trajectory[0])
                bank.finish_trajectory(trajectory[1](trajectory[0]))
                times[f"t{number}"] = (EPOCH + start, EPOCH + end)
        database = create_engine(url)
        with database.begin() as connection:
            for name, (start, end) in times.items():
                connection.execute(
                    text("update trajectories set started_at=:s, finished_at=:e where trajectory_id=:n"),
                    {"s": start, "e": end + self.loop.scenario.rollout.recording, "n": name},
                )
        database.dispose()


def _trajectory(
    name: str, play: Play, info: dict[str, float]
) -> tuple[Trajectory, Callable[[Trajectory], Trajectory]]:
    trajectory = Trajectory(name, f"g{play.group.position}", f"p{play.group.position}", SamplingParams(), {})

    def finish(trajectory: Trajectory) -> Trajectory:
        for turn in play.episode.turns:
            trajectory.append_context([1] * turn.context)
            version = play.actions[0][0]
            spans = [VersionSpan(version, 0, turn.actions)]
            trajectory.append_action([2] * turn.actions, [-1.0] * turn.actions, spans, "stop")
        trajectory.finish(Status.OK, 1.0, info)
        return trajectory

    return trajectory, finish


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Recorder(TRUTH, 24).write(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Scenario:
    return calibrate(folder)


def test_a_calibrated_model_repeats_the_run(model: Scenario) -> None:
    """Step time within 5 %, places taken within 5 %: what is left is the chance of the workload's order."""
    measured, repeated = simulate(TRUTH, steps=40), simulate(model, steps=40)
    assert repeated.step_seconds == pytest.approx(measured.step_seconds, rel=0.05)
    assert repeated.episodes_running == pytest.approx(measured.episodes_running, rel=0.05)
    assert repeated.gap_mean == pytest.approx(measured.gap_mean, abs=0.15)


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"bound": 0}},
        {"rollout": {"bound": 4, "groups": 3}, "publish": {"every": 2}},
        {"engines": {"count": 2}},
        {"rollout": {"concurrency": 12}},
    ],
)
def test_it_predicts_other_settings(model: Scenario, changes: dict[str, dict[str, Any]]) -> None:
    """Within 15 %, the product's own tolerance for step times, of what the true loop does under those settings."""

    def changed(scenario: Scenario) -> Scenario:
        for section in ("rollout", "publish", "engines"):  # the bound first: publishing checks itself against it
            part = replace(getattr(scenario, section), **changes.get(section, {}))
            scenario = replace(scenario, **{section: part})
        return scenario

    predicted, true = simulate(changed(model), steps=40), simulate(changed(TRUTH), steps=40)
    assert predicted.step_seconds == pytest.approx(true.step_seconds, rel=0.15)


CROWDED = replace(
    TRUTH,
    engines=EngineModel(step_base=0.005, step_per_request=0.006, request_seconds=0.1, interference=0.25),
    trainer=replace(TRUTH.trainer, interference=2.0),
)
"""Two processors for all, as on a small machine: an update beside busy engines takes three times as long."""


def with_policy(scenario: Scenario, **policy: Any) -> Scenario:
    return replace(scenario, rollout=replace(scenario.rollout, **policy))


def test_two_runs_tell_what_one_cannot(tmp_path: Path) -> None:
    """An asynchronous run shows no update alone, so what it says of a synchronous one is far off; beside a run with
    less overlap and fewer episodes both sides' speeds are known, and settings of neither are predicted within 15 %."""
    both = [
        Recorder(CROWDED, 24).write(tmp_path / "both"),
        Recorder(with_policy(CROWDED, bound=0, concurrency=8), 24).write(tmp_path / "apart"),
    ]
    one, two = calibrate(both[0]), calibrate(*both)
    assert two.trainer.interference == pytest.approx(2.0, abs=0.5)
    a_batch = CROWDED.rollout.batch * 140
    assert two.trainer.update_seconds(a_batch, 1) == pytest.approx(CROWDED.trainer.update_seconds(a_batch, 1), rel=0.1)

    def error(model: Scenario, **policy: Any) -> float:
        true = simulate(with_policy(CROWDED, **policy), steps=40).step_seconds
        return abs(simulate(with_policy(model, **policy), steps=40).step_seconds / true - 1)

    assert error(one, bound=0) > 0.15
    for policy in ({"bound": 0}, {"bound": 1, "concurrency": 12}, {"bound": 4, "groups": 3}):
        assert error(two, **policy) <= 0.15


def test_what_is_read_is_what_was_there(model: Scenario) -> None:
    assert (model.rollout.bound, model.rollout.concurrency, model.rollout.batch) == (2, 24, 24)
    assert model.workload.mean_actions == pytest.approx(TRUTH.workload.mean_actions, rel=0.1)  # a sample of the stock
    assert {len(group) for group in model.workload.groups} <= {1, 2, 3, 4}
    assert model.rollout.recording == pytest.approx(0.15, abs=1e-6)
    assert model.publish.paused == pytest.approx(0.2)
    assert model.trainer.overhead == pytest.approx(0.05, rel=0.2)  # alone, by the fitted interference
    assert not model.publish.retract


def test_predict_and_the_table_of_variants(folder: Path, model: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_async.main([str(folder), "--predict", str(folder), "--steps", "20"]) == 0
    assert "bound 2, 24 at once, batch 24, publish every 1" in capsys.readouterr().out
    prediction = simulation_checks.predict(model, folder, 0)
    assert prediction.error <= 0.05
    arguments = [str(folder), "--engines", "1", "2", "--source", "start", "ewma", "dedicated", "--steps", "10"]
    assert simulate_async.main([*arguments, "--set", "old_logits.switch=1.5"]) == 0
    out = capsys.readouterr().out
    assert out.count("dedicated, ") == 2  # left out, with the reason: there is one trainer node
    assert out.count("│ start ") == out.count("│ ewma ") == 2


def test_the_second_half_is_predicted_by_the_first_alone(folder: Path, tmp_path: Path) -> None:
    """Within the tolerance where the run goes on as it was; where it takes twice as long, that is not foreseen."""
    steady = simulation_checks.predict_second_half(folder, 0)
    assert steady.error <= simulation_checks.TOLERANCE
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    path = RunFiles(moved).metrics
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[12:]:
        row["time"] += row["time"] - rows[11]["time"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    slower = simulation_checks.predict_second_half(moved, 0)
    assert slower.predicted_seconds == pytest.approx(steady.predicted_seconds)
    assert slower.measured_seconds == pytest.approx(2 * steady.measured_seconds)
    (row,) = simulation_checks.prediction_rows([steady, slower])
    assert row.passed is False
    rows = simulation_checks.prediction_rows([steady, replace(slower, beyond=True)])
    assert [(row.figure, row.passed) for row in rows] == [
        ("simulator_step_time_error", True), ("simulator_extrapolation_error", False)
    ]  # fmt: skip


def test_a_model_is_put_under_another_runs_settings_and_nothing_else(model: Scenario, tmp_path: Path) -> None:
    sections = {"rollout": {"max_staleness": 0, "concurrency": 7, "max_tokens": 2048}, "engines": {"count": 3}}
    found = under_settings(model, load(write_config(tmp_path, **sections, publish={"pause_mode": "in_place"})))
    assert (found.rollout.bound, found.rollout.concurrency, found.engines.count) == (0, 7, 3)
    assert found.workload is model.workload
    assert found.engines.step_base == model.engines.step_base
    assert found.rollout.turnaround == model.rollout.turnaround


def test_plans_and_wrong_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(simulate_async.__file__).parent.parent
    scenario = simulate_async.read_scenario([root / "recipes" / "simulation" / "agents.yaml"], 0)
    assert scenario.rollout.batch == 128
    changed = simulate_async.overridden(scenario, ["engines.count=8", "trainer.interference=0.25"])
    assert (changed.engines.count, changed.trainer.interference) == (8, 0.25)
    with pytest.raises(ConfigError, match=r"did you mean .*count"):
        simulate_async.overridden(scenario, ["engines.cuont=8"])
    with pytest.raises(ConfigError, match="expected engines"):
        simulate_async.overridden(scenario, ["optimizer.lr=1"])
    assert simulate_async.main([str(tmp_path)]) == EXIT_USER_ERROR
    assert "config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [
    ["--set", "engines.count=0"], ["--set", "trainer.interference=much"], ["--set", "engines.interference=-1"],
    ["--steps", "0"],
    ["--set", "trainer.update_fixed=-1"], ["--set", "publish.every=0"], ["--engines", "0", "-3"], ["--bound", "-1"],
    ["--set", "rollout.admission=drop", "--set", "rollout.bound=0", "--set", "publish.every=3"],
])  # fmt: skip
def test_a_plan_that_cannot_be_is_a_message_and_no_traceback(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(simulate_async.__file__).parent.parent
    plan = str(root / "recipes" / "simulation" / "agents.yaml")
    assert simulate_async.main([plan, "--source", "start", *arguments]) == simulate_async.EXIT_USER_ERROR
    assert capsys.readouterr().err.startswith("simulate_async: ")


def test_a_variant_that_stands_still_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stands_still_alone(scenario: Scenario, **options: Any) -> Any:
        if scenario.engines.count == 1:
            raise ScenarioError("the simulated loop stands still")
        return simulate(scenario, **options)

    monkeypatch.setattr(simulate_async, "simulate", stands_still_alone)
    root = Path(simulate_async.__file__).parent.parent
    plan = str(root / "recipes" / "simulation" / "agents.yaml")
    assert simulate_async.main([plan, "--source", "start", "--steps", "1", "--engines", "1", "2"]) == 0
    out = capsys.readouterr().out
    assert "start, 1 engines: left out, the simulated loop stands still" in out and out.count("│ start ") == 1


def rewritten(folder: Path, to: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """The same run with other metrics."""
    shutil.copytree(folder, to)
    path = RunFiles(to).metrics
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    return to


@pytest.mark.parametrize("name", ["time", "seconds/step", "batch/tokens", "batch/trained", "batch/trajectories"])
def test_a_run_without_a_metric_that_is_needed_is_refused_with_its_name(
    name: str, folder: Path, tmp_path: Path
) -> None:
    changes: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
        lambda row: {key: value for key, value in row.items() if key != name},
        lambda row: {**row, name: None if row["step"] == 7 else row[name]},  # as what is no number is written
    ]
    for number, change in enumerate(changes):
        with pytest.raises(UserError, match=f"of 22 steps have no {name} in metrics.jsonl"):
            calibrate(rewritten(folder, tmp_path / str(number), change))


def test_a_step_without_what_its_publishing_cost_is_no_reason_to_refuse(folder: Path, model: Scenario) -> None:
    whole = measure(folder)
    rows = [{**row, **(dict.fromkeys(PUBLISHED) if row["step"] % 5 == 0 else {})} for row in whole.rows]
    found = calibration._publish([replace(whole, rows=rows)], model.trainer.interference)
    assert found.paused == pytest.approx(model.publish.paused)
    assert found.seconds == pytest.approx(model.publish.seconds, rel=0.1)


PUBLISHED = ("publish/paused_seconds", "seconds/publish")
NIGHT_S = 36_000.0


def test_a_night_between_a_stop_and_the_resume_is_no_time_that_a_step_takes(
    folder: Path, model: Scenario, tmp_path: Path
) -> None:
    """Stopped after 8 of 24 steps; what runs when it is stopped is on the timeline, and was never finished."""
    run = rewritten(folder, tmp_path / "run", lambda row: {**row, "time": row["time"] - NIGHT_S * (row["step"] < 8)})
    begun = json.loads(RunFiles(run).metrics.read_text().splitlines()[8])
    with RunFiles(run).timeline.open("a") as timeline:
        cut = {"part": "rollout", "stage": "episode", "step": 0, "start": EPOCH - NIGHT_S, "end": EPOCH - NIGHT_S / 2}
        timeline.write(f"{json.dumps(cut)}\n" * 20)
    found = calibrate(run)
    stretch = read_steps(run, SKIPPED_STEPS)
    assert [row["step"] for row in stretch.rows] == list(range(8 + SKIPPED_STEPS, 24))
    assert stretch.since == begun["time"] - begun["seconds/step"]
    assert found.trainer.overhead == pytest.approx(model.trainer.overhead, abs=0.01)
    assert found.rollout.recording == pytest.approx(model.rollout.recording, abs=1.0)
    assert simulation_checks.predict(found, run, 0).error <= simulation_checks.TOLERANCE


def test_a_run_that_was_never_long_at_work_is_refused(folder: Path, tmp_path: Path) -> None:
    run = rewritten(folder, tmp_path / "run", lambda row: {**row, "time": row["time"] + NIGHT_S * (row["step"] // 3)})
    with pytest.raises(UserError, match="its longest stretch without a stop has 1 steps"):
        calibrate(run)


def test_too_short_a_run_is_refused(tmp_path: Path) -> None:
    root = Recorder(TRUTH, SKIPPED_STEPS + 2).write(tmp_path)
    with pytest.raises(UserError, match="at least five"):
        calibrate(root)


# ---------------------------------------------------------------- the fits


def test_speed_is_found_from_seconds_alone() -> None:
    """Noise-free data: coefficients to 1e-6; with 5 % noise on 2,000 trajectories: within 15 %."""
    random = np.random.default_rng(0)
    tokens, turns = random.integers(20, 400, 2000).astype(float), random.integers(1, 8, 2000).astype(float)
    running, share = random.uniform(1, 60, 2000), random.uniform(0, 1, 2000)
    seconds = (1 + 0.45 * share) * (0.01 * tokens + 0.0005 * tokens * running) + 0.08 * turns
    slowed, steady = np.stack([tokens, tokens * running], axis=1), turns[:, None]
    found, interference = fit_slowdown([Samples(slowed, steady, share, seconds)])
    assert interference == pytest.approx(0.45)
    assert found == pytest.approx((0.01, 0.0005, 0.08), rel=1e-6)
    noisy, interference = fit_slowdown([Samples(slowed, steady, share, seconds * random.normal(1, 0.05, 2000))])
    assert interference == pytest.approx(0.45, abs=0.05)
    assert noisy == pytest.approx((0.01, 0.0005, 0.08), rel=0.15)


def test_what_differs_between_runs_outweighs_chance_within_one() -> None:
    """Shares known only on average explain nothing within a run: a synchronous one beside it shows the interference."""
    random = np.random.default_rng(0)

    def run(share: Any) -> Samples:
        tokens = random.uniform(50, 150, 1000)
        seconds = 0.01 * tokens * (1 + share) * random.normal(1, 0.02, 1000)
        return Samples(tokens[:, None], np.empty((1000, 0)), share, seconds)

    overlapped, alone = run(np.clip(random.normal(0.5, 0.2, 1000), 0, 1)), run(np.zeros(1000))
    blurred = replace(overlapped, share=random.permutation(overlapped.share))
    assert fit_slowdown([blurred])[1] < 0.2
    assert fit_slowdown([blurred, alone])[1] > 0.6  # the truth is 1


def test_non_negative_least_squares_is_optimal() -> None:
    """Karush-Kuhn-Tucker: no gradient along positive coordinates, none that would gain along the zero ones."""
    random = np.random.default_rng(1)
    for _ in range(50):
        features, target = random.normal(size=(30, 3)), random.normal(size=30)
        solution = non_negative_least_squares(features, target)
        gradient = features.T @ (features @ solution - target)
        assert (solution >= 0).all()
        np.testing.assert_allclose(gradient[solution > 0], 0, atol=1e-9)
        assert (gradient[solution == 0] >= -1e-9).all()


def test_cumulative_counts_open_intervals() -> None:
    """[0, 4] and [2, 3] and [6, 8]."""
    total = Cumulative([(0.0, 4.0), (2.0, 3.0), (6.0, 8.0)])
    starts, ends = np.array([-5.0, 0.0, 2.5, 4.0, 7.0]), np.array([20.0, 2.5, 3.0, 6.0, 9.0])
    np.testing.assert_allclose(total.over(starts, ends), [7.0, 3.0, 1.0, 0.0, 1.0])
    assert union([(6.0, 8.0), (0.0, 4.0), (2.0, 3.0), (4.0, 5.0)]) == [(0.0, 5.0), (6.0, 8.0)]


def test_engines_are_scaled_to_the_life_of_an_episode() -> None:
    """Engines that take twice as long: the factor is found to 10 % in one round, as the load changes a little."""
    slow = replace(TRUTH, engines=slower(TRUTH.engines, 2.0))
    result = simulate(slow, steps=24)
    life = result.episodes_running * result.step_seconds / TRUTH.rollout.batch
    assert slower(TRUTH.engines, life_factor(TRUTH, life)).request_seconds == pytest.approx(1.6, rel=0.1)
    assert life_factor(slow, life) == pytest.approx(1.0, rel=1e-6)


def test_turnaround_is_found_from_the_places_taken() -> None:
    true = simulate(TRUTH, steps=40).episodes_running
    unknown = replace(TRUTH, rollout=replace(TRUTH.rollout, turnaround=0.0))
    fitted = replace(unknown, rollout=replace(unknown.rollout, turnaround=fit_turnaround(unknown, true)))
    assert simulate(fitted, steps=40).episodes_running == pytest.approx(true, rel=0.03)
    assert fit_turnaround(unknown, 1e9) == 0.0
