"""Where results come to lie: a place for each policy and each set of tasks, and nothing in it is overwritten."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.config.schema import EnvironmentConfig, EvaluationConfig, ModelConfig, RunConfig
from megatron_async.evaluate import EvaluatedPolicy
from megatron_async.rollout import evaluation_files
from megatron_async.rollout.environments.base import Outcome, Task
from megatron_async.rollout.evaluation import journalled
from megatron_async.rollout.evaluation_episode import EvaluatedEpisode
from megatron_async.rollout.evaluation_files import results_folder
from megatron_async.rollout.evaluation_statistics import EvaluationResult
from megatron_async.rollout.evaluation_subject import Subject
from tests.unit.scripted_rollout import ScriptedSource
from tests.unit.tau2_support import requires_tau2


class Reporting(ScriptedSource):
    """Writes a file that has the name of its domain, as benchmarks do."""

    domain = "retail"

    def report(self, outcomes: Sequence[Outcome], samples: int, folder: Path) -> dict[str, Any]:
        (folder / f"bench-{self.domain}.json").write_text(self.domain)
        return {"results": f"bench-{self.domain}.json"}


class Crash(RuntimeError):
    pass


def config_of(folder: Path, **options: Any) -> RunConfig:
    return RunConfig(
        name="r",
        run_dir=str(folder),
        model=ModelConfig(path="none"),
        environment=EnvironmentConfig(**options) if options else EnvironmentConfig(),
        evaluation=EvaluationConfig(tasks=3, samples_per_task=2),
    )


def played(folder: Path, domain: str, stops_after: int = 99) -> tuple[EvaluationResult | None, int]:
    """(result, episodes that were played) of an evaluation of one domain into `folder`."""
    source, plays = Reporting(), 0
    source.domain = domain
    config = config_of(folder)

    async def play(task: Task, sample: str) -> EvaluatedEpisode:
        nonlocal plays
        if plays == stops_after:
            raise Crash
        plays += 1
        return EvaluatedEpisode(1.0, "done")

    work = journalled(config, play, source, Subject("endpoint", "m", "x"), {"domain": domain}, folder / "out")  # type: ignore[arg-type]
    result = None
    try:
        result = asyncio.run(work)
    except* Crash:
        pass
    return result, plays


def test_interrupted_evaluations_go_on_whatever_was_evaluated_in_between(tmp_path: Path) -> None:
    """In one folder that was asked for: one is stopped, another stopped, a third goes through, both others go on."""
    assert played(tmp_path, "retail", stops_after=4) == (None, 4)
    assert played(tmp_path, "airline", stops_after=5) == (None, 5)
    assert played(tmp_path, "telecom")[1] == 6
    for domain, left in (("retail", 2), ("airline", 1)):
        result, plays = played(tmp_path, domain)
        assert result is not None and (result.episodes, plays) == (6, left)
    assert not (tmp_path / "out/under_way").exists()


def test_results_that_lie_there_are_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All files of an evaluation stay together; files of others are left alone."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with caplog.at_level("INFO"):
        for domain in ("retail", "telecom", "telecom"):
            played(tmp_path, domain)
    assert sum("are in" in record.message for record in caplog.records) == 2
    out = tmp_path / "out"
    for folder, domain in ((out / "earlier/1", "retail"), (out / "earlier/2", "telecom"), (out, "telecom")):
        here = {path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}
        result = json.loads((folder / "evaluation.json").read_text())
        assert result["benchmark"] == {"results": f"bench-{domain}.json"}
        assert set(result["files"]) == here - {"notes.txt"}
        assert here - {"notes.txt"} == {"evaluated.json", "evaluation.json", "evaluation.md", f"bench-{domain}.json"}
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("moved", range(8))
def test_one_that_is_stopped_while_results_move_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    """Four files of the old results and four of the new ones: stopped after each of them, and gone on with."""
    played(tmp_path, "retail")
    moves = 0

    def replace(source: Path, target: Path) -> None:
        nonlocal moves
        if moves == moved:
            raise OSError(28, "No space left on device")
        moves += 1
        source.rename(target)

    with monkeypatch.context() as failing:
        failing.setattr(evaluation_files, "os", SimpleNamespace(replace=replace))
        with pytest.raises(OSError, match="No space"):
            played(tmp_path, "telecom")
    assert played(tmp_path, "telecom")[1] == 0
    out = tmp_path / "out"
    here = {path.name for path in out.iterdir() if path.is_file() and not path.name.startswith(".")}
    assert here == {"evaluated.json", "evaluation.json", "evaluation.md", "bench-telecom.json"}
    kept = [json.loads(path.read_text())["benchmark"]["results"] for path in out.glob("earlier/*/evaluation.json")]
    assert "bench-retail.json" in kept
    assert len(list(out.glob("earlier/*/bench-retail.json"))) == 1


def test_each_policy_and_each_set_of_tasks_has_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    desk = config_of(tmp_path)
    base, long = (
        replace(desk, environment=EnvironmentConfig("tests.unit.test_evaluation_files:named", {"name": name}))
        for name in ("a/b", "..")
    )
    policies = [EvaluatedPolicy(), EvaluatedPolicy(endpoint="http://x", endpoint_model="a/b")]
    policies.append(EvaluatedPolicy(checkpoint=tmp_path))
    places = [policy.place(config) for policy in policies for config in (desk, base, long)]
    assert len(set(places)) == len(places)
    assert all((tmp_path / "r/evaluation") in place.resolve().parents for place in places)
    assert places[3:5] == [tmp_path / "r/evaluation/a-b/desk", tmp_path / "r/evaluation/a-b/a-b"]


class Named(ScriptedSource):
    called = ""

    def folder_name(self) -> str:
        return self.called


def named(options: dict[str, Any], split: str, seed: int) -> Named:
    source = Named()
    source.called = options["name"]
    return source


@requires_tau2
def test_domains_splits_modes_and_prompts_of_tau2_have_folders(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("{policy}")
    names = []
    for options in (
        {"domain": "telecom"},
        {"domain": "telecom", "heldout_split": "base"},
        {"domain": "telecom", "solo": True},
        {"domain": "telecom", "system_prompt_file": str(prompt)},
        {"domain": "mock", "heldout_split": "base", "train_split": "base"},
    ):
        usual = {"user": {"kind": "scripted"}, "train_on_evaluation_tasks": True}
        config = config_of(tmp_path, name="tau2", options={**usual, **options})
        names.append(results_folder(config, "engines").name)
    assert names == [
        "tau2-telecom-test",
        "tau2-telecom-base",
        "tau2-telecom-solo-test",
        "tau2-telecom-test-own_prompt",
        "tau2-mock-base",
    ]
