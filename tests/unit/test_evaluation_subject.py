"""Whom an evaluation asks: a checkpoint trained again at the same path, or another file of options, is another one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.schema import EnvironmentConfig, ModelConfig, RunConfig
from megatron_async.rollout.evaluation_episode import EvaluatedEpisode
from megatron_async.rollout.evaluation_journal import EvaluationJournal
from megatron_async.rollout.evaluation_subject import (
    Subject,
    checkpoint_digest,
    conditions,
    file_digests,
    read_subject,
    without_password,
    write_subject,
)
from tests.unit.scripted_rollout import ScriptedSource


def write_checkpoint(folder: Path, header: str = '{"w": 1}', weights: bytes = b"12345678", **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    (folder / "model.safetensors.index.json").write_text("{}")
    data = len(header).to_bytes(8, "little") + header.encode() + weights
    (folder / "model.safetensors").write_bytes(data)
    for path in folder.iterdir():
        os.utime(path, ns=(10**9, 10**9))


def test_only_the_same_checkpoint_has_the_same_digest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder)
    first = checkpoint_digest(folder)
    write_checkpoint(folder)
    (folder / ".claim").write_text("1")
    (folder / "states").mkdir()
    assert checkpoint_digest(folder) == first
    seen = {first}
    for change in (
        lambda: write_checkpoint(folder, rope_theta=1e6),
        lambda: write_checkpoint(folder, header='{"w": 2}'),
        lambda: write_checkpoint(folder, weights=b"123456789"),
        lambda: (folder / "chat_template.jinja").write_text("{{ other }}"),
    ):
        write_checkpoint(folder)
        change()
        seen.add(checkpoint_digest(folder))
    assert len(seen) == 5
    # Trained again: the same shapes, and only the time betrays it.
    (folder / "chat_template.jinja").unlink()
    write_checkpoint(folder)
    os.utime(folder / "model.safetensors", ns=(10**9, 10**9 + 1))
    assert checkpoint_digest(folder) not in seen


def test_files_that_options_name_are_known_by_what_they_hold(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.json"
    tasks.write_text("[1]")
    nested = {"files": [str(tasks), "no file"]}
    options = {"task_file": str(tasks), "user": nested, "text": "x" * 9000, "n": 3, "z": "\0"}
    first = file_digests(options)
    assert set(first) == {"task_file", "user.files.0"}
    tasks.write_text("[2]")
    second = file_digests(options)
    assert first["task_file"] != second["task_file"] and first["user.files.0"] != second["user.files.0"]


class Labelled(ScriptedSource):
    def labels(self) -> dict[str, str]:
        return {"prompt": "own"}


@pytest.mark.parametrize("changed", ["checkpoint", "file", "seed", "labels", "limits"])
def test_episodes_of_another_subject_are_not_counted(tmp_path: Path, changed: str) -> None:
    folder, prompt = tmp_path / "checkpoint", tmp_path / "prompt.txt"
    write_checkpoint(folder)
    prompt.write_text("Be kind.")

    def journal(seed: int = 0, source: Any = None, turns: int = 4) -> EvaluationJournal:
        environment = EnvironmentConfig("x", {"system_prompt_file": str(prompt)})
        config = RunConfig(name="r", model=ModelConfig(path=str(folder)), environment=environment, seed=seed)
        subject = Subject(
            "checkpoint", "m", str(folder), checkpoint_digest(folder), limits={"max_turns": turns}, seed=seed
        )
        same = conditions(config, source or ScriptedSource(), subject, versions=[0])
        return EvaluationJournal(tmp_path / "under_way", same)

    journal().save(0, 0, "task-0", EvaluatedEpisode(1.0, "done"))
    assert len(journal()) == 1
    other: dict[str, Any] = {}
    if changed == "checkpoint":
        write_checkpoint(folder, weights=b"87654321")
        os.utime(folder / "model.safetensors", ns=(2 * 10**9, 2 * 10**9))
    elif changed == "file":
        prompt.write_text("Be unkind.")
    else:
        other = {"seed": {"seed": 1}, "labels": {"source": Labelled()}, "limits": {"turns": 5}}[changed]
    assert len(journal(**other)) == 0


def test_what_is_reported_about_reaches_whoever_reports(tmp_path: Path) -> None:
    assert read_subject(tmp_path) == {}
    write_subject(tmp_path, {"left_out": 3})
    assert read_subject(tmp_path) == {"left_out": 3}
    assert without_password("http://me:secret@host:1/v1") == "http://host:1/v1"
