"""Options of the tau2 environment: unknown keys, impossible values, and training on evaluation tasks are refused."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import check, load
from megatron_async.config.schema import EnvironmentConfig
from megatron_async.rollout.environments import build_task_source
from megatron_async.rollout.environments.tau2.options import Tau2Options, parse
from tests.unit.configs import MOE_SHAPE, make_checkpoint
from tests.unit.tau2_support import domain, requires_tau2

SCRIPTED = {"user": {"kind": "scripted"}}


def tasks(split: Any = "train", **options: Any) -> Any:
    return build_task_source(EnvironmentConfig("tau2", {**SCRIPTED, **options}), split, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domian": "retail"}, "unknown option domian .* did you mean domain"),
        ({"user": {"kind": "endpoint", "endpoint": {"ulr": "x"}}}, r"user\.endpoint\.ulr"),
        ({"judge": {"modell": "x"}}, r"judge\.modell .* did you mean judge\.model"),
        ({"domain": "bank", **SCRIPTED}, "domain='bank'; known: airline"),
        ({"domain": "airline", "solo": True}, "airline domain has no solo mode"),
        ({"verify_official": 2.0, **SCRIPTED}, "share between 0 and 1"),
        ({"max_steps": 0, **SCRIPTED}, "max_steps=0"),
        ({"domain": "retail"}, r"user\.endpoint\.url is missing"),
        ({"user": {"kind": "recorded"}}, "needs user.transcripts"),
        ({"reward_basis": "mine", **SCRIPTED}, "reward_basis='mine'"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(options)


def test_the_guides_configuration_is_a_whole_one(tmp_path: Path) -> None:
    """Loaded and checked as it stands in docs/tau2.md, but for the checkpoint."""
    guide = (Path(__file__).parents[2] / "docs" / "tau2.md").read_text()
    (whole,) = [block for block in re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL) if "evaluation:" in block]
    file = tmp_path / "run.yaml"
    file.write_text(whole)
    shape = {**MOE_SHAPE, "max_position_embeddings": 40960}
    config = load(file, [f"model.path={make_checkpoint(tmp_path / 'model', shape)}"])
    assert isinstance(check(config), list)
    options = parse(config.environment.options)
    assert (options.domain, options.user.endpoint.concurrency, config.evaluation.tasks) == ("retail", 64, 40)


def test_defaults_follow_the_benchmark() -> None:
    options = parse(SCRIPTED)
    assert options == Tau2Options(user=options.user)
    assert (options.max_steps, options.max_errors, options.verify_official) == (200, 10, 0.02)


@requires_tau2
def test_splits_are_those_of_the_benchmark_and_apart() -> None:
    sizes = {
        name: (tasks(domain=name).size, tasks("heldout", domain=name).size)
        for name in ("airline", "retail", "telecom")
    }
    assert sizes == {"airline": (30, 20), "retail": (74, 40), "telecom": (74, 40)}
    train, heldout = tasks(domain="retail"), tasks("heldout", domain="retail")
    assert not {train.task(i).task_id for i in range(74)} & {heldout.task(i).task_id for i in range(40)}


@requires_tau2
@pytest.mark.parametrize("split", ["base", "test", "full"])
def test_training_on_evaluation_tasks_needs_the_flag_and_is_stamped(split: str) -> None:
    with pytest.raises(ValueError, match=r"are evaluation tasks .*train_on_evaluation_tasks"):
        tasks(domain="telecom", train_split=split)
    source = tasks(domain="telecom", train_split=split, train_on_evaluation_tasks=True)
    assert source.task(0).data["trained_on_evaluation_tasks"] == 40
    if split == "full":
        assert tasks(domain="telecom", train_split=split, exclude_splits=["test"]).size == 2245


@requires_tau2
def test_training_order_depends_on_the_seed_only() -> None:
    def order(seed: int) -> list[str]:
        source = build_task_source(
            EnvironmentConfig("tau2", {**SCRIPTED, "domain": "airline"}), "train", seed
        )
        return [source.task(i).task_id for i in range(30)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))


@requires_tau2
def test_tasks_that_share_a_ticket_are_groups_of_their_own() -> None:
    source = tasks("heldout", domain="telecom", solo=True)
    chosen = [source.task(index) for index in range(source.size)]
    tickets = {source.context.domain.tasks[task.data["id"]].ticket for task in chosen}
    assert len(tickets) <= 5
    assert len({task.task_id for task in chosen}) == source.size == 40


@requires_tau2
def test_own_task_and_database_files(tmp_path: Path) -> None:
    retail = domain("retail")
    chosen = list(retail.tasks.values())[:3]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([json.loads(task.model_dump_json()) for task in chosen]))
    (tmp_path / "split_mine.json").write_text(json.dumps({"train": ["0"], "test": ["1", "2"]}))
    database = tmp_path / "db.json"
    dumped = json.loads(retail.official_constructor().tools.db.model_dump_json())
    dumped["users"] = {"only": next(iter(dumped["users"].values()))}
    database.write_text(json.dumps(dumped))
    options = {"domain": "retail", "task_file": str(path), "database_file": str(database)}
    source = tasks(**options)
    assert (source.size, tasks("heldout", **options).size) == (1, 2)
    environment = source.environment(source.task(0))
    assert list(environment.episode.environment.tools.db.users) == ["only"]
    assert list(source.context.domain.official_constructor().tools.db.users) == ["only"]


@requires_tau2
@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({"heldout_split": "base"}, 74),  # base is train and test
        ({"heldout_split": "train"}, 74),
        ({"train_split": "full", "exclude_splits": ["test"]}, 0),
        ({"train_split": "full"}, 40),
        ({}, 0),
    ],
)
def test_shared_tasks_are_counted_whatever_the_splits_are_called(options: dict[str, Any], shared: int) -> None:
    train = tasks("train", domain="telecom", train_on_evaluation_tasks=True, **options)
    assert train.stamp().get("trained_on_evaluation_tasks", 0) == shared
    heldout = tasks("heldout", domain="telecom", train_on_evaluation_tasks=True, **options)
    assert heldout.labels() == {"user": "scripted"}, "whoever is evaluated need not have been trained so"


@requires_tau2
def test_an_evaluation_needs_no_training_tasks() -> None:
    options = {"domain": "telecom", "train_split": "train", "exclude_splits": ["train"]}
    with pytest.raises(ValueError, match="no training tasks are left of train after exclude_splits"):
        tasks("train", **options)
    assert tasks("heldout", **options).size == 40


@requires_tau2
def test_heldout_file_with_training_tasks_is_refused_or_stamped(tmp_path: Path) -> None:
    retail = domain("retail")
    path = tmp_path / "mine.json"
    trained = [retail.tasks[task_id] for task_id in retail.split("train")[:10]]
    path.write_text(json.dumps([json.loads(task.model_dump_json()) for task in trained]))
    options = {"domain": "retail", "heldout_task_file": str(path)}
    with pytest.raises(ValueError, match=r"10 of 74 training tasks .*mine\.json"):
        tasks("train", **options)
    allowed = tasks("train", **options, train_on_evaluation_tasks=True)
    assert allowed.task(0).data["trained_on_evaluation_tasks"] == 10


@requires_tau2
def test_everything_that_is_not_the_benchmarks_is_labelled(tmp_path: Path) -> None:
    endpoint = {"kind": "endpoint", "endpoint": {"url": "http://127.0.0.1:9/v1"}}
    assert tasks("heldout", domain="retail", user=endpoint).labels() == {}
    assert tasks("heldout", domain="telecom", solo=True).labels() == {}
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("{policy}")
    options = {"max_errors": 1000, "max_steps": 5, "enforce_communication_protocol": True}
    source = tasks("heldout", domain="retail", system_prompt_file=str(prompt), reward_basis="no_judge", **options)
    digest = "prompt.txt sha256:" + hashlib.sha256(b"{policy}").hexdigest()[:12]
    assert source.labels() == {
        "prompt": "own",
        "system_prompt_file": digest,
        "user": "scripted",
        "reward_policy": "no_judge",
        "max_errors": "1000",
        "max_steps": "5",
        "enforce_communication_protocol": "True",
    }
    assert source.task(0).data["system_prompt_file"] == digest


@requires_tau2
def test_own_files_are_labelled_with_their_content(tmp_path: Path) -> None:
    retail = domain("retail")
    task = json.loads(next(iter(retail.tasks.values())).model_dump_json())
    found = []
    for number in range(2):
        path = tmp_path / str(number) / "mine.json"
        path.parent.mkdir()
        path.write_text(json.dumps([{**task, "id": f"own {number}"}]))
        source = tasks("heldout", domain="retail", heldout_task_file=str(path))
        found.append(source.labels()["heldout_task_file"])
        assert "trained_on_evaluation_tasks" not in source.labels()
    assert found[0] != found[1]
    assert all(label.startswith("mine.json sha256:") for label in found)
