"""Reports: the benchmark's own format and metrics, the floor, and evaluations that go on after an interruption."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_async.rollout.environments.base import EnvironmentFailure, Outcome, ReportingTaskSource
from megatron_async.rollout.estimators import over_tasks, pass_hat_k
from tests.unit.tau2_support import altered, domain, play, requires_tau2, sample_ids
from tests.unit.test_tau2_episode import environment_of, source_of

pytestmark = requires_tau2


def outcomes_of(source: Any, task_ids: list[str], samples: int, seed: int = 0) -> list[Outcome]:
    """Played outcomes: gold or mute at random, one real conversation per task."""
    rng = random.Random(seed)
    tasks = {source.task(i).data["id"]: source.task(i) for i in range(source.size)}
    outcomes = []
    for task_id in task_ids:
        gold = altered(source.context.domain.tasks[task_id], "gold", False)
        played = {
            good: asyncio.run(play(environment_of(source, task_id), gold if good else gold[-1:]))
            for good in (True, False)
        }
        for sample in range(samples):
            reward, info = played[rng.random() < 0.6]
            outcomes.append(Outcome(tasks[task_id], sample, reward, info, 100 + sample, 5, 1.5))
    return outcomes


def test_results_are_read_by_the_benchmark_and_give_its_numbers(tmp_path: Path) -> None:
    source = source_of("telecom")
    assert isinstance(source, ReportingTaskSource)
    outcomes = outcomes_of(source, sample_ids("telecom", 6), samples=4)
    summary = source.report(outcomes, 4, tmp_path)
    package = domain("telecom").package
    results = package.Results.load(tmp_path / summary["results"])
    metrics = importlib.import_module("tau2.metrics.agent_metrics").compute_metrics(results)
    assert {int(k): v for k, v in summary["pass_hat"].items()} == pytest.approx(metrics.pass_hat_ks)
    assert summary["success_rate"] == pytest.approx(metrics.avg_reward)
    assert len(results.simulations) == summary["episodes"] == 24
    assert [m.role for m in results.simulations[0].messages][:2] == ["assistant", "user"]
    assert summary["floor"] == 0.0
    assert summary["terminations"] == {"user_stop": 24}
    page = (tmp_path / "tau2-telecom.md").read_text()
    assert "Doing nothing scores 0.0%" in page
    assert "user: scripted" in page


@pytest.mark.parametrize("seed", range(20))
def test_pass_hat_k_is_the_benchmarks_on_random_tables(seed: int) -> None:
    theirs = importlib.import_module("tau2.metrics.agent_metrics").pass_hat_k
    rng = random.Random(seed)
    table = [[rng.random() < 0.7 for _ in range(rng.randint(4, 8))] for _ in range(12)]
    for k, ours in over_tasks(table, 4, pass_hat_k).items():
        expected = sum(theirs(len(row), sum(row), k) for row in table) / len(table)
        assert ours == pytest.approx(expected, abs=1e-15)


def test_training_on_evaluation_tasks_stands_in_the_report(tmp_path: Path) -> None:
    source = source_of("telecom", heldout_split="test", train_split="base", train_on_evaluation_tasks=True)
    task_id = source.task(0).data["id"]
    summary = source.report(outcomes_of(source, [task_id], 1), 1, tmp_path)
    assert summary["trained_on_evaluation_tasks"] == 40
    assert "no benchmark number" in (tmp_path / "tau2-telecom.md").read_text()
    assert json.loads((tmp_path / "tau2-telecom.json").read_text())["info"]["num_trials"] == 1


def test_errors_of_the_user_simulator_stand_in_the_report(tmp_path: Path) -> None:
    endpoint = {"kind": "endpoint", "endpoint": {"url": "http://127.0.0.1:9/v1", "retries": 0}}
    source = source_of("telecom", user=endpoint)
    environment = source.environment(source.task(0))

    async def unanswered() -> None:
        try:
            await environment.reset()
        finally:
            await environment.close()

    with pytest.raises(EnvironmentFailure, match="user simulator: "):
        asyncio.run(unanswered())
    task_id = source.task(0).data["id"]
    summary = source.report(outcomes_of(source_of("telecom"), [task_id], 1), 1, tmp_path)
    assert summary["user_errors"] == {"repeated": 0, "unanswered": 1}
    assert "0 requests repeated, 1 given up" in (tmp_path / "tau2-telecom.md").read_text()


def test_cut_episodes_are_reported_as_the_benchmarks_step_limit(tmp_path: Path) -> None:
    source = source_of("retail")
    environment = environment_of(source, "0")
    asyncio.run(environment.reset())
    reward, info = asyncio.run(environment.reward())
    task = next(source.task(i) for i in range(source.size) if source.task(i).data["id"] == "0")
    summary = source.report([Outcome(task, 0, reward, info, 1, 1, 0.0)], 1, tmp_path)
    assert summary["terminations"] == {"cut": 1}
    written = json.loads((tmp_path / "tau2-retail.json").read_text())
    assert written["simulations"][0]["termination_reason"] == "max_steps"
