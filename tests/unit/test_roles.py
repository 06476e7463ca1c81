"""Trainer and rollout are started again after an accident, in the right order, and not for ever."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async import roles
from megatron_async.bank import Bank
from megatron_async.bank.requests import PHASE, RESUMING, TRAINING
from megatron_async.config.schema import ModelConfig, RunConfig, TrainerConfig
from megatron_async.roles import Roles
from megatron_async.supervise import Part, PartFailed, supervised
from tests.bank_support import collect_group

# Notes its start in a common file, then does what the n-th word says at its n-th start: a code to end with, or "stay".
ACTOR = """
name="$1"; notes="$2"; shift 2
echo "$name" >> "$notes"; n=$(grep -c "^$name$" "$notes")
what=$(eval echo "\\${$n:-0}")
if [ "$what" = stay ]; then exec sleep 60; fi
exit "$what"
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "_POLL_S", 0.02)
    monkeypatch.setattr(roles, "_PAUSE_S", 0.0)


def make(folder: Path, steps: int = 1, max_restarts: int = 2) -> RunConfig:
    config = RunConfig(name="run", run_dir=str(folder), model=ModelConfig(path=""))
    config = replace(config, trainer=TrainerConfig(max_restarts=max_restarts))
    config.run_path.mkdir()
    with Bank.open(config.bank_url) as bank:
        bank.set_state(PHASE, TRAINING)
        for step in range(steps):
            collect_group(bank, f"g{step}")
            assert bank.take_batch(step, 1, 2, 0)
            bank.commit_step(step, 0, 0)
    return config


def actor(folder: Path, name: str, *plan: str) -> Part:
    return Part(name, ["sh", "-c", ACTOR, "actor", name, str(folder / "notes"), *plan], folder / f"{name}.log")


def play(config: RunConfig, folder: Path, trainer: list[str], rollout: list[str]) -> list[str]:
    """Run both; the order of their starts."""

    def tick() -> None:
        # The trainer's part of the protocol: engines hold its version as soon as it runs.
        with Bank.open(config.bank_url) as bank:
            if bank.get_state(PHASE) == RESUMING:
                bank.set_state(PHASE, TRAINING)

    parts: list[Part] = []
    with supervised(parts):
        Roles(config, [actor(folder, "trainer", *trainer)], actor(folder, "rollout", *rollout), parts).run(tick)
    return (folder / "notes").read_text().split()


def restarts(config: RunConfig) -> list[tuple[str, int]]:
    path = config.run_path / "restarts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(row["part"], row["exit_code"]) for row in rows]


def test_a_trainer_that_ends_is_started_again_with_a_new_rollout_after_it(tmp_path: Path) -> None:
    config = make(tmp_path)
    assert play(config, tmp_path, ["7", "0"], ["stay", "stay"]) == ["trainer", "rollout", "trainer", "rollout"]
    assert restarts(config) == [("trainer", 7)]


def test_a_rollout_that_ends_is_started_again_alone(tmp_path: Path) -> None:
    config = make(tmp_path)
    # The trainer is done when the second rollout runs.
    (tmp_path / "notes").touch()
    waits = f"until [ $(grep -c rollout {tmp_path}/notes) -ge 2 ]; do sleep 0.02; done"
    trainer = Part("trainer", ["sh", "-c", waits], tmp_path / "trainer.log")
    parts: list[Part] = []
    with supervised(parts):
        Roles(config, [trainer], actor(tmp_path, "rollout", "5", "stay"), parts).run()
    assert (tmp_path / "notes").read_text().split() == ["rollout", "rollout"]
    assert restarts(config) == [("rollout", 5)]


# The first critic ends once the trainer runs; the trainer is done once a second critic runs.
BESIDE = """
echo critic >> "$1"
if [ $(grep -c critic "$1") -gt 1 ]; then exec sleep 60; fi
until grep -q trainer "$1"; do sleep 0.02; done
exit 9
"""
WITH_BESIDE = """
echo trainer >> "$1"
until [ $(grep -c critic "$1") -gt 1 ]; do sleep 0.02; done
"""


def test_what_trains_beside_the_trainer_ends_and_starts_with_it(tmp_path: Path) -> None:
    config, notes = make(tmp_path), tmp_path / "notes"
    critic, trainer = (
        Part(name, ["sh", "-c", script, name, str(notes)], tmp_path / f"{name}.log")
        for name, script in (("critic", BESIDE), ("trainer", WITH_BESIDE))
    )
    rollout = Part("rollout", ["sleep", "60"], tmp_path / "rollout.log")
    parts: list[Part] = []
    with supervised(parts):
        Roles(config, [critic, trainer], rollout, parts).run()
    assert sorted(notes.read_text().split()) == ["critic", "critic", "trainer", "trainer"]
    assert restarts(config) == [("critic", 9)]


def test_starts_without_a_further_step_are_counted_and_end_the_run(tmp_path: Path) -> None:
    config = make(tmp_path, max_restarts=2)
    with pytest.raises(PartFailed, match="trainer ended with exit code 7"):
        play(config, tmp_path, ["7", "7", "7", "7"], ["stay"] * 4)
    assert restarts(config) == [("trainer", 7)] * 2


@pytest.mark.parametrize(("steps", "code"), [(0, "7"), (1, "2")])
def test_what_the_user_has_to_mend_is_not_tried_again(tmp_path: Path, steps: int, code: str) -> None:
    """A run that never trained a step, or a part that says it is the user's to mend (exit code 2)."""
    config = make(tmp_path, steps=steps)
    with pytest.raises(PartFailed, match=f"exit code {code}"):
        play(config, tmp_path, [code, "0"], ["stay"])
    assert restarts(config) == []
