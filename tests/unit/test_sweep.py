"""The sweep: what is planned, what is skipped, what a failure or a Ctrl-C leaves. The main job itself is replaced."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest

from megatron_async import launch
from megatron_async.bank import Bank
from megatron_async.config import ConfigError, RunConfig
from megatron_async.errors import EXIT_STOPPED, EXIT_USER_ERROR, UserError
from megatron_async.observe import MetricsWriter, append_evaluation
from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint
from tools import sweep, sweep_report
from tools.sweep_measures import token_mean
from tools.sweep_plan import plan, read_sweep
from tools.sweep_recovery import bar, recoveries

BASE = """
steps: 4
model: {{path: {model}, dtype: float32}}
name: base
trainer: {{micro_batch_tokens: 4096}}
rollout: {{max_staleness: 1, max_new_tokens: 32, max_tokens: 256}}
objective: {{mask_low: 0.5, mask_high: 2.0}}
"""
SWEEP = """
name: trial
base: {folder}/base.yaml
seeds: [0, 1]
vary:
  anchor:
    start: {{objective.anchor: start}}
    linear: {{objective.anchor: linear}}
  lag:
    "1": {{}}
    "3": {{rollout.max_staleness: 3, publish.every: 3}}
plots: {{curves: []}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_checkpoint(path, 0, TinyShape())
    return path


@pytest.fixture
def file(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE.format(model=model))
    path = tmp_path / "trial.yaml"
    path.write_text(SWEEP.format(folder=tmp_path))
    return path


class FakeJob:
    """Stands for `launch.run`: writes what a run leaves, or ends as told."""

    def __init__(self) -> None:
        self.launched: list[RunConfig] = []
        self.ends: dict[int, object] = {}  # call number -> exception to raise, or exit code

    def __call__(self, config: RunConfig, *, fresh: bool = False) -> int:
        assert fresh
        self.launched.append(config)
        end = self.ends.get(len(self.launched))
        if isinstance(end, BaseException):
            raise end
        if end is not None:
            return int(end)  # type: ignore[call-overload]
        write_run(launch.create_folder(config, fresh=True).root, config)
        return 0


def write_run(path: Path, config: RunConfig) -> None:
    with Bank.open(config.bank_url):
        pass
    with MetricsWriter(path) as metrics:
        for step in range(config.steps):
            tokens = 100 * (step + 1)
            metrics.log(step, {
                "reward/mean": 0.1 * step + config.seed, "batch/action_tokens": 12,
                "batch/trained_action_tokens": tokens, "seconds/step": 2.0,
                "objective/active": 1.0 / (step + 1), "objective/clipped_high": 0.25, "objective/clipped_low": 0.5,
                "version_gap/mean": 1.0, "version_gap/max": 2, "seconds/wait_batch": 1.0,
            })  # fmt: skip
    for step, rate in ((0, 0.25), (config.steps, 0.5 + 0.1 * config.seed)):
        append_evaluation(path, {"step": step, "version": step, "success_rate": rate, "stderr": 0.01})


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> FakeJob:
    fake = FakeJob()
    monkeypatch.setattr(launch, "run", fake)
    return fake


def run(file: Path, *arguments: str) -> int:
    return sweep.main([str(file), "--folder", str(file.parent / "out"), *arguments])


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in (file.parent / "out" / "rows.jsonl").read_text().splitlines()]


def test_every_combination_on_every_seed_seed_by_seed(file: Path) -> None:
    runs = plan(read_sweep(file), file.parent / "out")
    assert [(r.seed, *r.values.values()) for r in runs] == [
        (seed, anchor, lag) for seed in (0, 1) for anchor in ("start", "linear") for lag in ("1", "3")
    ]
    lagged = runs[3].config
    assert (lagged.objective.anchor, lagged.seed) == ("linear", 0)
    assert (lagged.rollout.max_staleness, lagged.publish.every) == (3, 3)
    assert len({r.identity for r in runs}) == len({r.config.name for r in runs}) == 8


def test_identity_follows_every_option_but_names_and_places(file: Path) -> None:
    def identities(folder: str, *overrides: str) -> set[str]:
        return {r.identity for r in plan(read_sweep(file, overrides), file.parent / folder)}

    first = identities("out")
    assert identities("elsewhere", "name=other", "set={observe.tensorboard: false}") == first
    assert not identities("out", "set={optimizer.lr: 2e-6}") & first
    assert not identities("out", "set={steps: 5}") & first
    assert len(identities("out", "seeds=[1, 2]") & first) == 4


def test_a_wrong_option_is_refused_before_anything_runs(file: Path, job: FakeJob) -> None:
    with pytest.raises(ConfigError, match=r"linear.*optimiser"):
        plan(read_sweep(file, ["vary.anchor.linear={optimiser.lr: 1}"]), file.parent)
    assert run(file, "--set", "set={publish.every: 9}") == EXIT_USER_ERROR
    assert job.launched == []


def test_dry_run_starts_nothing(file: Path, job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(file, "--dry-run") == 0
    assert "8 to run" in capsys.readouterr().out
    assert job.launched == []
    assert not (file.parent / "out").exists()


def test_finished_runs_are_skipped_and_new_ones_made(file: Path, job: FakeJob) -> None:
    assert run(file, "--set", "seeds=[0]") == 0
    assert len(job.launched) == 4
    assert run(file) == 0
    assert [config.seed for config in job.launched] == [0] * 4 + [1] * 4
    assert run(file) == 0
    assert len(job.launched) == 8


def test_ctrl_c_leaves_a_sweep_that_goes_on(file: Path, job: FakeJob) -> None:
    job.ends = {3: EXIT_STOPPED}
    assert run(file) == EXIT_STOPPED
    assert [row["status"] for row in rows(file)] == ["finished"] * 2
    assert run(file) == 0
    assert len(job.launched) == 3 + 6  # the interrupted run again, and the rest
    assert len({row["identity"] for row in rows(file)}) == 8


def test_failures_are_recorded_and_run_again_when_asked(
    file: Path, job: FakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job.ends = {2: UserError("the engine died"), 5: ValueError("odd")}
    assert run(file) == sweep.EXIT_FAILURES
    reasons = [row["reason"] for row in rows(file) if row["status"] == "failed"]
    assert reasons == ["UserError: the engine died", "ValueError: odd"]
    assert run(file) == 0
    assert len(job.launched) == 8
    run(file, "--dry-run")
    assert "6 finished, 2 failed" in capsys.readouterr().out
    assert run(file, "--retry-failed") == 0
    assert len(job.launched) == 10
    assert run(file, "--dry-run") == 0
    assert "8 finished, 0 failed" in capsys.readouterr().out


def test_a_run_that_did_not_end_is_a_failure(file: Path, job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run", lambda config, fresh: 0)  # nothing written
    assert run(file, "--max-failures", "2") == EXIT_USER_ERROR
    assert [row["status"] for row in rows(file)] == ["failed"] * 2
    assert "did not end" in rows(file)[0]["reason"]


def test_no_run_is_started_that_would_not_end_in_time(file: Path, job: FakeJob) -> None:
    assert run(file, "--set", "seeds=[0]") == 0
    path = file.parent / "out" / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "seconds": 300.0}) + "\n" for row in rows(file)))
    assert run(file, "--minutes", "4") == 0
    assert len(job.launched) == 4
    assert run(file, "--minutes", "6") == 0
    assert len(job.launched) == 8


def test_two_processes_do_not_share_a_sweep(file: Path, job: FakeJob) -> None:
    with sweep.only_one(file.parent / "out"):
        assert run(file) == EXIT_USER_ERROR
    assert job.launched == []


def test_one_warm_start_for_all_runs_of_a_seed(file: Path, job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def sft(config: RunConfig, *, fresh: bool) -> int:
        made.append(config)
        write_tiny_checkpoint(config.run_path / "checkpoint", config.seed, TinyShape())
        return 0

    monkeypatch.setattr(launch, "sft", sft)
    warm = file.parent / "warm.yaml"
    warm.write_text((file.parent / "base.yaml").read_text())
    arguments = ("--set", f"warm_start.config={warm}")
    assert run(file, *arguments) == 0
    assert [config.seed for config in made] == [0, 1]
    assert {(c.seed, c.model.path) for c in job.launched} == {(c.seed, str(c.run_path / "checkpoint")) for c in made}
    assert run(file, *arguments, "--set", "warm_start.set={steps: 9}") == 0
    assert len(made) == 4  # another warm start: everything anew
    assert len(job.launched) == 16


def test_rows_hold_the_measures(file: Path, job: FakeJob) -> None:
    assert run(file, "--set", "seeds=[1]") == 0
    row = rows(file)[0]
    assert (row["success_before"], row["success_after"], row["steps"], row["version_gap_max"]) == (0.25, 0.6, 4, 2)
    assert row["active"] == pytest.approx(4 * 100 / 1000)  # each step: 100 (s+1) tokens of activity 1/(s+1)
    assert row["curve"]["reward/mean"] == pytest.approx([1.0, 1.1, 1.2, 1.3])
    assert row["trajectories"]["stale"] == 0


def test_token_mean_leaves_out_steps_without_the_metric() -> None:
    steps = [
        {"a": 1.0, "batch/action_tokens": 12, "batch/trained_action_tokens": 10},
        {"batch/action_tokens": 12, "batch/trained_action_tokens": 0},
        {"a": 0.0, "batch/action_tokens": 12, "batch/trained_action_tokens": 30},
    ]
    assert token_mean(steps, "a") == pytest.approx(0.25)
    assert token_mean(steps, "b") is None


def test_table_and_figures_show_the_spread_over_seeds(file: Path, job: FakeJob) -> None:
    plots = "plots={curves: [reward/mean], against: {axis: lag, measures: [active]}}"
    assert run(file, "--set", "seeds=[0, 1, 4]", "--set", plots) == 0
    report = (file.parent / "out" / "report.md").read_text()
    success = [50.0, 60.0, 90.0]
    assert f"| start | 1 | 3 | 25.0 ± 0.0 | {np.mean(success):.1f} ± {stdev(success):.1f} |" in report
    assert (file.parent / "out" / "report_curves.png").stat().st_size > 10_000
    assert (file.parent / "out" / "report_against_lag.png").stat().st_size > 10_000
    figures = sweep_report.figures([row for row in rows(file) if row["status"] == "finished"])
    assert figures[0].figure == "success_start_1"
    assert figures[0].values == pytest.approx([0.5, 0.6, 0.9])


def test_curves_are_a_running_mean_with_the_spread_of_seeds() -> None:
    members = [{"curve": {"m": [0.0, 1.0, None, 3.0]}}, {"curve": {"m": [2.0, 3.0, 4.0]}}]
    mean, spread = sweep_report.curve_over_seeds(members, "m")
    # first seed: 0, 1/2, 1/2, 4/3; second: 2, 5/2, 3
    np.testing.assert_allclose(mean, [1.0, 1.5, 1.75, 4 / 3])
    np.testing.assert_allclose(spread, [2**0.5, 2**0.5, 2.5 / 2**0.5, 0.0])


def test_the_sweeps_of_the_repository_are_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = Path(sweep.__file__).parent.parent
    monkeypatch.chdir(root)
    files = sorted((root / "recipes" / "sweeps").glob("*.yaml"))
    assert files
    for path in files:
        assert len({r.identity for r in plan(read_sweep(path), tmp_path)}) >= 9


def run_with_switches(rewards: list[float], phases: list[float], seed: int = 0) -> dict[str, Any]:
    return {"seed": seed, "curve": {"reward/mean": rewards, "environment/phase": phases}}


def test_recovery_counts_steps_from_each_switch() -> None:
    rewards = [0.8] * 6 + [0.2] * 3 + [0.8] * 7 + [0.1] * 8
    phases = [0.0] * 5 + [0.4] + [0.6] + [1.0] * 9 + [2.0] * 8
    # The second phase has its majority at step 6 and five good steps from step 9 on; the third is never learned.
    assert recoveries([run_with_switches(rewards, phases)]) == [[(3, True), (8, False)]]
    assert recoveries([{"seed": 0, "curve": {"reward/mean": [0.5] * 4}}]) == [[]]


def test_runs_of_a_seed_are_held_against_one_bar() -> None:
    phases = [0.0] * 6 + [1.0] * 6 + [2.0] * 6
    good = run_with_switches([0.8] * 6 + [0.1] * 6 + [0.8] * 6, phases)
    poor = run_with_switches([0.4] * 6 + [0.1] * 12, phases)
    assert bar([good, poor]) == pytest.approx(0.9 * 0.6)
    # What never recovered from the first switch has not recovered from the second because it is as bad as before it.
    assert recoveries([good, poor]) == [[(6, False), (0, True)], [(6, False), (6, False)]]
    other_seed = run_with_switches([0.4] * 18, phases, seed=1)
    assert recoveries([good, other_seed])[1] == [(0, True), (0, True)]
