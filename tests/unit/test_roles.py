"""Trainer and rollout are started again after an accident, in the right order, and not for ever."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async import roles
from megatron_async.bank import Bank
from megatron_async.bank.errors import BankAway
from megatron_async.bank.requests import FINISHED, PHASE, RESUMING, TRAINING
from megatron_async.config.schema import ModelConfig, RunConfig, TrainerConfig
from megatron_async.errors import ERROR_FILE, UserError, leave_message
from megatron_async.peers import PeerGone
from megatron_async.roles import Roles
from megatron_async.supervise import Part, PartFailed, python_module, supervised
from megatron_async.training.batch import BatchDeadline
from megatron_async.training.remote_critic import CriticGone
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


def until_two_rollouts(config: RunConfig, folder: Path, ends_with: str) -> None:
    """The first rollout ends; the trainer is done when the second one runs."""
    (folder / "notes").touch()
    waits = f"until [ $(grep -c rollout {folder}/notes) -ge 2 ]; do sleep 0.02; done"
    trainer = Part("trainer", ["sh", "-c", waits], folder / "trainer.log")
    parts: list[Part] = []
    with supervised(parts):
        Roles(config, [trainer], actor(folder, "rollout", ends_with, "stay"), parts).run()


def test_a_rollout_that_ends_is_started_again_alone(tmp_path: Path) -> None:
    config = make(tmp_path)
    until_two_rollouts(config, tmp_path, "5")
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


def test_what_never_trained_a_step_is_not_tried_again(tmp_path: Path) -> None:
    config = make(tmp_path, steps=0)
    with pytest.raises(PartFailed, match="exit code 7"):
        play(config, tmp_path, ["7", "0"], ["stay"])
    assert restarts(config) == []


def test_a_rollout_that_was_told_to_stop_by_somebody_else_is_started_again(tmp_path: Path) -> None:
    """SIGTERM ends it with exit code 0, at any step; without another one the trainer would wait for a batch in vain."""
    config = make(tmp_path, steps=0)
    until_two_rollouts(config, tmp_path, "0")
    assert restarts(config) == [("rollout", 0)]


def test_a_rollout_that_ends_with_the_run_is_not_started_again(tmp_path: Path) -> None:
    config = make(tmp_path)
    trainer = Part("trainer", ["sh", "-c", "until grep -q rollout ../notes; do sleep 0.02; done; sleep 0.3"],
                   tmp_path / "run" / "trainer.log")  # fmt: skip
    trainer.argv[2] = trainer.argv[2].replace("../notes", str(tmp_path / "notes"))
    (tmp_path / "notes").touch()

    def tick() -> None:
        with Bank.open(config.bank_url) as bank:
            bank.set_state(PHASE, FINISHED)

    parts: list[Part] = []
    with supervised(parts):
        Roles(config, [trainer], actor(tmp_path, "rollout", "0", "stay"), parts).run(tick)
    assert (tmp_path / "notes").read_text().split() == ["rollout"]


# As a trainer rank: the command line of the product, and an error from inside.
RANK = """
import os, sys
from megatron_async import cli, errors
def ends(arguments):
    with open(sys.argv[1], "a") as notes:
        notes.write("trainer\\n")
    raise getattr(errors, sys.argv[2])(f"rank {os.environ.get('RANK')} says: raise the frobnication")
cli._doctor = ends
raise SystemExit(cli.main(["doctor"]))
"""


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def rank(folder: Path, error: str, *torchrun: str) -> Part:
    script = folder / "rank.py"
    script.write_text(RANK)
    arguments = (str(script), str(folder / "notes"), error)
    command = python_module(*torchrun, *arguments) if torchrun else [sys.executable, *arguments]
    return Part("trainer", command, folder / "trainer.log")


def test_a_message_for_the_user_comes_through_torchrun_and_ends_the_run(tmp_path: Path) -> None:
    """torchrun ends with code 1 whatever its ranks end with. What an earlier start said is not believed."""
    config = make(tmp_path)
    (tmp_path / "trainer.error").write_text("of an earlier start")
    trainer, rollout = rank(tmp_path, "UserError", *TORCHRUN), actor(tmp_path, "rollout", "stay")
    parts: list[Part] = []
    with supervised(parts), pytest.raises(PartFailed, match="(?s)exit code 1: rank [01] says: raise the frob.*its log"):
        Roles(config, [trainer], rollout, parts).run()
    assert restarts(config) == []


def test_a_part_that_ends_because_another_did_is_started_again(tmp_path: Path) -> None:
    config = make(tmp_path, max_restarts=1)
    (tmp_path / "trainer.error").write_text("of an earlier start")
    trainer, rollout = rank(tmp_path, "PartnerGone"), actor(tmp_path, "rollout", "stay", "stay")
    parts: list[Part] = []
    with supervised(parts), pytest.raises(PartFailed, match="exit code 2; its log"):
        Roles(config, [trainer], rollout, parts).run()
    assert restarts(config) == [("trainer", 2)]


def test_the_part_that_says_why_is_named_and_not_the_one_that_heard_its_end_first(tmp_path: Path) -> None:
    config = make(tmp_path)
    says = f'printf "raise the frobnication" > "${ERROR_FILE}"; touch {tmp_path}/said; exec sleep 60'
    critic = Part("critic", ["sh", "-c", says], tmp_path / "critic.log")
    waits = f"until [ -e {tmp_path}/said ]; do sleep 0.02; done; exit 1"
    trainer = Part("trainer", ["sh", "-c", waits], tmp_path / "trainer.log")
    parts: list[Part] = []
    with supervised(parts), pytest.raises(PartFailed, match="critic .*raise the frobnication"):
        Roles(config, [critic, trainer], actor(tmp_path, "rollout", "stay"), parts).run()


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (BatchDeadline("no batch"), "no batch"),
        (PeerGone("silent"), None),
        (CriticGone("gone"), None),
        (BankAway("no answer"), None),
        (RuntimeError("a defect"), None),
    ],
)
def test_only_what_the_user_has_to_mend_leaves_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, left: str | None
) -> None:
    """That a peer, an engine or the database is gone may pass: the part is started again."""
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "said"))
    leave_message(error)
    assert ((tmp_path / "said").read_text() if (tmp_path / "said").exists() else None) == left
    leave_message(UserError("of a slower rank"))
    assert (tmp_path / "said").read_text() == (left or "of a slower rank")
