"""What a policy was trained on goes with its weights, and reports claim what is on record and nothing else."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async import training_record
from megatron_async.config.schema import EnvironmentConfig, ModelConfig, RunConfig
from megatron_async.errors import UserError
from megatron_async.observe import read_evaluations
from megatron_async.replay import record_training
from megatron_async.rollout import evaluation
from megatron_async.rollout.environments import build_task_source
from megatron_async.rollout.environments.base import Task
from megatron_async.rollout.evaluation import evaluate
from megatron_async.rollout.evaluation_episode import EvaluatedEpisode
from megatron_async.rollout.evaluation_statistics import EvaluationResult, describe
from megatron_async.rollout.evaluation_subject import Subject
from megatron_async.rollout.recorded_tasks import compared, training_on
from megatron_async.training_record import REINFORCED, WARM_START
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.scripted_rollout import ScriptedSource
from tests.unit.tau2_support import domain, requires_tau2
from tests.unit.test_rollout_process import make_run

FLAG = {"train_on_evaluation_tasks": True}


def tau2(**options: Any) -> EnvironmentConfig:
    return EnvironmentConfig("tau2", {"domain": "telecom", "user": {"kind": "scripted"}, **options})


def trained(folder: Path, model: Path, environment: EnvironmentConfig, kind: str = REINFORCED) -> Path:
    """What a run leaves: its record beside its exported weights."""
    began_with = ModelConfig(str(model))
    config = RunConfig(name=folder.name, run_dir=str(folder.parent), model=began_with, environment=environment)
    checkpoint = config.run_path / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    tasks = build_task_source(environment, "train", config.seed)
    training_record.begin(config, training_on(config, kind, tasks))
    training_record.carry(config.run_path, checkpoint)
    return checkpoint


def known_of(checkpoint: Path, environment: EnvironmentConfig) -> dict[str, Any]:
    """As an evaluation of the checkpoint on all held-out tasks of the environment has it."""
    heldout = build_task_source(environment, "heldout", 0)
    assert heldout.size is not None
    return compared(training_record.read(checkpoint), environment.name, heldout, heldout.size)


@requires_tau2
@pytest.mark.parametrize(
    ("trains", "evaluates", "shared"),
    [
        ({}, {}, 0),
        ({}, {"heldout_split": "base"}, 74),  # base is train and test
        ({"train_split": "base", **FLAG}, {}, 40),
        ({"train_split": "full", "exclude_splits": ["test"]}, {}, 0),
        pytest.param(  # the same tasks, played otherwise
            {"train_split": "test", "solo": True, **FLAG}, {"domain": "telecom-workflow"}, 40, marks=pytest.mark.slow
        ),
        pytest.param(  # ids are numbers in both
            {"train_split": "test", "domain": "retail", **FLAG}, {"domain": "airline"}, 0, marks=pytest.mark.slow
        ),
    ],
)
def test_a_checkpoint_knows_how_many_evaluated_tasks_it_was_trained_on(
    tmp_path: Path, trains: dict[str, Any], evaluates: dict[str, Any], shared: int
) -> None:
    """Whatever the configuration of the evaluation says about training."""
    checkpoint = trained(tmp_path / "run", tmp_path, tau2(**trains))
    known = known_of(checkpoint, tau2(**evaluates))
    assert (known["shared"], known["unlisted"]) == (shared, 0)
    assert Subject("checkpoint", "m", "m", training=known).labels() == (
        {"trained_on_evaluation_tasks": str(shared)} if shared else {}
    )


@requires_tau2
def test_an_own_file_of_known_tasks_is_recognised(tmp_path: Path) -> None:
    retail = domain("retail")
    path = tmp_path / "mine.json"
    tasks = [retail.tasks[task_id] for task_id in [*retail.split("train")[:10], *retail.split("test")[:5]]]
    path.write_text(json.dumps([json.loads(task.model_dump_json()) for task in tasks]))
    checkpoint = trained(tmp_path / "run", tmp_path, tau2(domain="retail"))
    assert known_of(checkpoint, tau2(domain="retail", heldout_task_file=str(path)))["shared"] == 10


@requires_tau2
def test_a_warm_start_on_evaluation_tasks_is_not_forgotten(tmp_path: Path) -> None:
    warm = trained(tmp_path / "warm", tmp_path, tau2(train_split="test", **FLAG), WARM_START)
    for _ in range(2):  # the second time as a resumed run
        checkpoint = trained(tmp_path / "clean", warm, tau2())
    known = known_of(checkpoint, tau2())
    assert [(item["kind"], item["run"], item["tasks"]) for item in known["trainings"]] == [
        (WARM_START, "warm", 40),
        (REINFORCED, "clean", 74),
    ]
    assert known["trainings"][0]["about"]["tasks_by_split"]["test"] == 40
    assert known["shared"] == known["evaluated"] == 40
    said = training_record.describe(known)
    assert "warm start on tau2, domain telecom, split test (40 tasks); then reinforcement learning on tau2" in said
    assert "40 of the 40 evaluated tasks are among those listed" in said


@requires_tau2
def test_the_record_holds_no_address_key_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "of gold")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("{policy}")
    endpoint = {"url": "http://me:secret@users.example:1/v1", "api_key_env": "THE_KEY"}
    options = {"user": {"kind": "endpoint", "endpoint": endpoint}, "system_prompt_file": str(prompt)}
    checkpoint = trained(tmp_path / "run", tmp_path, tau2(**options))
    text = (checkpoint / training_record.FILE).read_text()
    assert "prompt.txt sha256:" in text
    assert not [word for word in ("users.example", "secret", "THE_KEY", "of gold", str(tmp_path)) if word in text]
    assert len(text) < 10_000


def test_nothing_is_claimed_without_a_record(tmp_path: Path) -> None:
    assert training_record.read(tmp_path) is None
    assert compared(None, "tau2", ScriptedSource(), 3) == {}
    result = play(Subject("endpoint", "m", "http://host:1/v1"))
    assert describe(result).count("Unknown what it was trained on.") == 1
    assert result.labels == {}


def test_tasks_that_are_not_listed_are_not_said_to_be_new(tmp_path: Path) -> None:
    """A million generated tasks, or a rank that was started by hand."""
    desk = EnvironmentConfig("desk")
    checkpoint = trained(tmp_path / "run", tmp_path, desk)
    said = training_record.describe(known_of(checkpoint, desk))
    assert "reinforcement learning on desk (990000 tasks); its record lists no tasks to compare with." in said
    config = RunConfig(name="by_hand", run_dir=str(tmp_path), model=ModelConfig(str(checkpoint)), environment=desk)
    config.run_path.mkdir()
    training_record.begin_if_missing(config, REINFORCED)
    training_record.begin_if_missing(config, REINFORCED)
    found = training_record.read(config.run_path)
    assert found is not None and [(item.run, item.tasks) for item in found] == [("run", 990_000), ("by_hand", None)]


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', '{"format": 1, "trained_on": [{"tasks": 3}]}'])
def test_a_damaged_record_is_no_clean_one(tmp_path: Path, text: str) -> None:
    (tmp_path / training_record.FILE).write_text(text)
    with pytest.raises(UserError, match=r"trained_on\.json is no record of what the weights were trained on"):
        training_record.read(tmp_path)


def test_a_replay_was_trained_on_what_the_recorded_run_was(tmp_path: Path) -> None:
    trained(tmp_path / "recorded", tmp_path, EnvironmentConfig("desk", {"pool": 5}))
    config = RunConfig(name="again", run_dir=str(tmp_path), model=ModelConfig(str(tmp_path)))
    config.run_path.mkdir()
    record_training(tmp_path / "recorded", config)
    assert training_record.read(config.run_path) == training_record.read(tmp_path / "recorded")
    (tmp_path / "recorded" / training_record.FILE).unlink()  # of an earlier release
    (config.run_path / training_record.FILE).unlink()
    record_training(tmp_path / "recorded", config)
    (only,) = training_record.read(config.run_path) or ()
    assert only.digests is None


class Tasks(ScriptedSource):
    """The same tasks under ids of another mode."""

    def task(self, index: int) -> Task:
        task = super().task(index)
        return Task(f"other-{task.task_id}", {**task.data, "identity": task.task_id})


def play(subject: Subject) -> EvaluationResult:
    async def win(_task: Task, _sample: str) -> EvaluatedEpisode:
        return EvaluatedEpisode(1.0, "done")

    return asyncio.run(evaluate(win, ScriptedSource(), tasks=4, samples=1, concurrency=1, subject=subject))


def test_what_is_on_record_stands_on_the_page_and_in_the_row() -> None:
    config = RunConfig(name="r", model=ModelConfig("m"), environment=EnvironmentConfig("own:tasks"))
    record = [training_on(config, REINFORCED, Tasks(size=3))]
    known = compared(record, "own:tasks", ScriptedSource(), 4)
    result = play(Subject("checkpoint", "m", "m", training=known))
    assert result.as_dict()["labels"] == {"trained_on_evaluation_tasks": "3"}
    page = describe(result)
    assert "**3 of the evaluated tasks were among the training tasks: no benchmark number.**" in page
    assert "Trained, by its record: reinforcement learning on own:tasks (3 tasks); 3 of the 4 evaluated tasks" in page


def test_a_run_is_what_its_checkpoint_was_until_it_publishes(tmp_path: Path, smallest_checkpoint: Path) -> None:
    """Engines at version 0 hold the weights that the run began with; later ones were trained by it."""
    model = shutil.copytree(smallest_checkpoint, tmp_path / "model")

    async def scenario() -> None:
        async with ScriptedEngine(6) as engine:
            config = make_run(tmp_path, model, [engine.url])
            source = build_task_source(config.environment, "train", config.seed)
            for folder, environment in ((model, "earlier"), (config.run_path, "this")):
                named = replace(config, environment=EnvironmentConfig(environment))
                training_record.write(folder, [training_on(named, REINFORCED, source)])
            for engine.version in (0, 3):
                await asyncio.to_thread(evaluation.evaluate_run, config, tmp_path / "results")
            rows = [row["subject"]["training"]["trainings"] for row in read_evaluations(config.run_path)]
            assert [item["environment"] for row in rows for item in row] == ["earlier", "this"]

    asyncio.run(scenario())
