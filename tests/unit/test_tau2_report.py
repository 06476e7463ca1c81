"""Reports: the benchmark's own format and metrics, the floor, and evaluations that go on after an interruption."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_async.rollout import environment_calls
from megatron_async.rollout.blocking import Call
from megatron_async.rollout.environment_calls import EpisodeFailure
from megatron_async.rollout.environments.base import Outcome, ReportingTaskSource
from megatron_async.rollout.environments.tau2 import report, reward
from megatron_async.rollout.environments.tau2.episode import Said
from megatron_async.rollout.environments.tau2.users import CLOSING
from megatron_async.rollout.estimators import over_tasks, pass_hat_k
from megatron_async.rollout.evaluation import evaluate
from megatron_async.rollout.evaluation_episode import EvaluatedEpisode
from megatron_async.rollout.evaluation_subject import Subject
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
    assert summary["pass_hat_95"][1] == summary["pass_at_95"][1] == summary["confidence_95"]
    low, high = summary["pass_hat_95"][4]
    assert f"| 4 | {summary['pass_hat'][4]:.3f} | {low:.3f} to {high:.3f} | {summary['pass_at'][4]:.3f} | " in page
    assert "user: scripted" in page


def test_the_benchmarks_viewer_shows_what_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of("retail", verify_official=0.0)
    tasks = [source.task(index) for index in range(source.size)]
    task = next(t for t in tasks if criteria_of(source, t).communicate_info and criteria_of(source, t).actions)
    actions = criteria_of(source, task).actions
    gold = altered(source.context.domain.tasks[task.data["id"]], "gold", False)
    for turns, mark, match in ((gold, "✅", "YES"), ([Said(CLOSING)], "❌", "NO")):
        reward, info = asyncio.run(play(environment_of(source, task.data["id"]), turns))
        summary = source.report([Outcome(task, 0, reward, info, 1, 1, 1.0)], 1, tmp_path)
        shown = viewed(tmp_path / summary["results"], monkeypatch)
        assert f"DB Match: {match}" in shown and f"DB Check:{mark} {reward}" in shown
        checked = shown.split("Action Checks:")[1].split("Communicate Checks:")
        assert checked[0].count(mark) == len(actions)
        assert checked[1].count(mark) == len(criteria_of(source, task).communicate_info)
        assert info["transcript"][1]["content"][:20] in shown


def criteria_of(source: Any, task: Any) -> Any:
    return source.context.domain.tasks[task.data["id"]].evaluation_criteria


def viewed(results: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the benchmark's own viewer prints of a results file: its list, and the first simulation with its task."""
    console = importlib.import_module("rich.console").Console(record=True, width=200, file=io.StringIO())
    viewer = importlib.import_module("tau2.scripts.view_simulations")
    monkeypatch.setattr(viewer.ConsoleDisplay, "console", console)
    loaded = domain("retail").package.Results.load(results)
    viewer.display_simulation_list(loaded)
    viewer.ConsoleDisplay.display_task(loaded.tasks[0])
    viewer.ConsoleDisplay.display_simulation(loaded.simulations[0])
    text: str = console.export_text()
    return text


@pytest.mark.parametrize("seed", range(20))
def test_pass_hat_k_is_the_benchmarks_on_random_tables(seed: int) -> None:
    """Its own whole computation, on results in its format; tasks have as many trials as they have, or none."""
    source = source_of("telecom")
    rng = random.Random(seed)
    fewest = rng.choice([1, 1, 2, 4])
    counts = [rng.choice([0, *range(fewest, 5)]) for _ in range(11)] + [fewest]
    table = [[rng.random() < 0.7 for _ in range(count)] for count in counts]
    outcomes = [
        Outcome(source.task(index), sample, float(passed), {"termination": "user_stop"}, 1, 1, 1.0)
        for index, row in enumerate(table)
        for sample, passed in enumerate(row)
    ]
    results = report.benchmark_results(source.context.domain, source.options, outcomes, 4, {})
    theirs = importlib.import_module("tau2.metrics.agent_metrics").compute_metrics(results).pass_hat_ks
    assert over_tasks(table, 4, pass_hat_k) == pytest.approx(theirs, abs=1e-15)
    assert max(theirs) == fewest


def test_the_report_says_who_was_evaluated_and_what_it_lacks(tmp_path: Path) -> None:
    """Through an evaluation: one of three tasks fails in one trial, as its user does not answer."""
    plays: Counter[str] = Counter()

    class Source:
        split = "heldout"

        def __init__(self) -> None:
            self.tasks = source_of("telecom", verify_official=0.0)
            self.size, self.report = self.tasks.size, self.tasks.report

        def labels(self) -> dict[str, str]:
            return {"task_file": "mine.json"}

        def task(self, index: int) -> Any:
            return self.tasks.task(index)

        def environment(self, task: Any) -> Any:
            return self.tasks.environment(task)

    source: Any = Source()

    async def mute(task: Any, sample: str) -> EvaluatedEpisode:
        plays[task.task_id] += 1
        if task.task_id == source.task(0).task_id and sample.startswith("1-"):
            return EvaluatedEpisode(None, "environment_failure")
        gold = altered(source.tasks.context.domain.tasks[task.data["id"]], "gold", False)
        reward, info = await play(environment_of(source.tasks, task.data["id"]), gold[-1:])
        return EvaluatedEpisode(reward, "done", info, versions=(3, 3))

    name, sampling = "/data/Qwen3-4B", {"temperature": 0.5}
    subject = Subject("checkpoint", name, name, "0123456789abcdef", sampling, {"max_turns": 9})
    asyncio.run(evaluate(mute, source, tasks=3, samples=2, concurrency=1, folder=tmp_path, subject=subject))
    page = (tmp_path / "tau2-telecom.md").read_text()
    assert "model /data/Qwen3-4B, from /data/Qwen3-4B (digest 0123456789abcdef), policy version 3." in page
    assert "Sampling: temperature 0.5. Limits: max_turns 9." in page
    assert "Episodes left out: 1." in page and "Tasks that lack trials: 1;" in page
    assert "User model: none; judge model: none." in page
    assert "**task file: mine.json.**" in page
    assert "on no episode was it compared" in page
    info = json.loads((tmp_path / "tau2-telecom.json").read_text())["info"]
    assert (info["agent_info"]["llm"], info["agent_info"]["llm_args"]) == ("/data/Qwen3-4B", {"temperature": 0.5})
    assert info["user_info"]["llm"] is None


@pytest.mark.parametrize(
    ("agreed", "evaluator", "said"),
    [
        ([True, False, None], "cached", "disagreed on 1 of 2 episodes compared"),
        ([None, None], "cached", "on no episode was it compared"),
        ([None], "official", "The benchmark's own evaluator judged every episode"),
    ],
)
def test_disagreements_are_of_the_episodes_compared(
    tmp_path: Path, agreed: list[bool | None], evaluator: str, said: str
) -> None:
    source = source_of("telecom", evaluator=evaluator)
    infos = [{"termination": "user_stop"} | ({} if one is None else {"official_agrees": one}) for one in agreed]
    outcomes = [Outcome(source.task(0), n, 1.0, info, 1, 1, 1.0) for n, info in enumerate(infos)]
    source.report(outcomes, len(agreed), tmp_path)
    assert said in (tmp_path / "tau2-telecom.md").read_text()


def test_models_of_user_and_judge_stand_in_the_report(tmp_path: Path) -> None:
    def named(model: str) -> dict[str, Any]:
        return {"url": "http://127.0.0.1:9/v1", "model": model}

    source = source_of("telecom", user={"kind": "endpoint", "endpoint": named("Us")}, judge=named("Ju"))
    outcome = Outcome(source.task(0), 0, 1.0, {"termination": "user_stop"}, 1, 1, 1.0)
    source.report([outcome], 1, tmp_path)
    assert "User model: Us; judge model: Ju." in (tmp_path / "tau2-telecom.md").read_text()
    info = json.loads((tmp_path / "tau2-telecom.json").read_text())["info"]
    assert (info["user_info"]["llm"], info["agent_info"]["llm"]) == ("Us", "not stated")


def test_reports_need_none_of_our_packages() -> None:
    """The benchmark may run in a process whose interpreter has its packages and aiohttp alone (option `python`)."""
    ours = ("yaml", "msgspec", "zstandard", "torch", "sglang_bridge")
    code = (
        "import sys, megatron_async.rollout.environments.tau2.report; "
        f"sys.exit(', '.join(name for name in {ours} if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_training_on_evaluation_tasks_stands_in_the_report(tmp_path: Path) -> None:
    """Of a checkpoint that was; in the benchmark's own format too, with what else makes it incomparable."""
    tasks = tmp_path / "mine.json"
    own = list(domain("telecom").tasks.values())[:2]
    tasks.write_text(json.dumps([json.loads(task.model_dump_json()) for task in own]))
    source = source_of("telecom", heldout_task_file=str(tasks), max_errors=3)
    record = {"trainings": [], "evaluated": 2, "shared": 2, "unlisted": 0}
    subject = Subject("checkpoint", "mine", "/data/mine", training=record)

    async def win(_task: Any, _sample: str) -> EvaluatedEpisode:
        return EvaluatedEpisode(1.0, "done", {"termination": "user_stop"})

    result = asyncio.run(evaluate(win, source, tasks=2, samples=1, concurrency=1, folder=tmp_path, subject=subject))
    unusual = {
        "user": "scripted",
        "heldout_task_file": source.labels()["heldout_task_file"],
        "max_errors": "3",
        "trained_on_evaluation_tasks": "2",
    }
    assert result.labels == unusual
    assert result.benchmark["trained_on_evaluation_tasks"] == 2
    said = "**2 of the evaluated tasks were among the training tasks: no benchmark number.**"
    page = (tmp_path / "tau2-telecom.md").read_text()
    assert page.count(said) == 1 and page.count("**max errors: 3.**") == 1
    read = domain("telecom").package.Results.load(tmp_path / "tau2-telecom.json")
    assert len(read.simulations) == 2
    for simulation in read.simulations:
        note = json.loads(simulation.reward_info.info["note"])
        assert note["labels"] == unusual
        assert (note["domain"], note["prompt"], note["reward_policy"]) == ("telecom", "benchmark", "official")


def test_a_report_without_an_evaluation_says_what_its_tasks_say(tmp_path: Path) -> None:
    source = source_of("telecom", max_errors=3)
    source.report([Outcome(source.task(0), 0, 1.0, {"termination": "user_stop"}, 1, 1, 1.0)], 1, tmp_path)
    assert "**max errors: 3.**" in (tmp_path / "tau2-telecom.md").read_text()


def test_errors_of_user_and_judge_stand_in_the_report_of_their_evaluation(tmp_path: Path) -> None:
    """Counted with the episodes: a second evaluation in the same process begins at none. The user of the first task
    gives up twice before it answers, the other's judge never answers."""
    models = {
        "user": {"kind": "endpoint", "endpoint": {"url": "http://127.0.0.1:9/v1", "retries": 0}},
        "judge": {"url": "http://127.0.0.1:9/v1"},
    }
    source = source_of("telecom", **models)
    scripted = source_of("telecom")
    plays: Counter[str] = Counter()

    async def player(task: Any, sample: str) -> EvaluatedEpisode:
        plays[task.task_id] += 1
        if task.task_id == source.task(0).task_id and plays[task.task_id] <= 2:
            environment = source.environment(task)
            try:
                await environment_calls.ask(Call(environment, "reset"), environment.reset, 60.0)
            except EpisodeFailure as failure:
                return EvaluatedEpisode(None, failure.kind)
            finally:
                await environment.close()
        if task.task_id == source.task(1).task_id:
            return EvaluatedEpisode(None, reward.JUDGE_FAILED)
        reward_, info = await play(environment_of(scripted, task.data["id"]), [Said("Goodbye.")])
        return EvaluatedEpisode(reward_, "done", {**info, "user_repeats": 2, "judge_repeats": 1})

    for given_up in (2, 0):
        result = asyncio.run(evaluate(player, source, tasks=3, samples=1, concurrency=1, folder=tmp_path))
        assert result.benchmark["user_errors"] == {"repeated": 4, "unanswered": given_up}
        assert result.benchmark["judge_errors"] == {"repeated": 2, "unanswered": 3}
        page = (tmp_path / "tau2-telecom.md").read_text()
        assert f"User simulator: 4 requests of these episodes repeated, {given_up} attempts at an" in page
        assert "Judge: 2 requests of these episodes repeated, 3 attempts at an" in page


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
