"""Every place from which environment code is run: what it sees of the process's environment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_async.bank import Bank, State
from megatron_async.config import from_dict
from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles
from megatron_async.rollout import environments, process, task_checks
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.endpoint_policy import endpoint_options, evaluate_endpoint
from megatron_async.rollout.environments import AssistantTurn, Environment, Message, Split, Start, Step, Task
from megatron_async.rollout.evaluation import evaluate_engines
from megatron_async.roster import Engine, write_roster
from tests.unit.scripted_engine import ScriptedEngine

SECRETS = {"HF_TOKEN": "t", "PGPASSWORD": "p", "WANDB_API_KEY": "w", "BANK": "postgresql://me:pa55@db/runs"}
WANTED = {"USER_MODEL_KEY": "k"}
seen: list[tuple[str, frozenset[str]]] = []
"""(who looked, which of the variables above it saw)"""


def look(who: str) -> None:
    seen.append((who, frozenset(os.environ) & frozenset(SECRETS | WANTED)))


class Looking(Environment):
    async def reset(self) -> Start:
        look("reset")
        return Start([Message("user", "go")], [])

    async def step(self, turn: AssistantTurn) -> Step:
        look("step")
        return Step([], done=True)

    async def reward(self) -> tuple[float, dict[str, Any]]:
        look("reward")
        return 1.0, {}

    async def close(self) -> None:
        look("close")


class LookingTasks:
    def __init__(self, split: Split) -> None:
        self.split: Split = split

    @property
    def size(self) -> int | None:
        look("size")
        return 100

    def task(self, index: int) -> Task:
        look("task")
        return Task(f"{self.split}-{index}", {})

    def environment(self, task: Task) -> Environment:
        look("environment")
        return Looking()


def build(options: Mapping[str, Any], split: Split, seed: int) -> LookingTasks:
    look("build")
    return LookingTasks(split)


def demonstrate(
    options: Mapping[str, Any], count: int, seed: int, chat: ChatFormat
) -> list[tuple[list[int], list[bool]]]:
    look("demonstrate")
    return []


@pytest.fixture
def config(tmp_path: Path, smallest_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    seen.clear()
    for name, value in (SECRETS | WANTED).items():
        monkeypatch.setenv(name, value)
    return from_dict(
        {
            "name": "r",
            "run_dir": str(tmp_path),
            "model": {"path": str(smallest_checkpoint)},
            "batch": {"groups": 1, "group_size": 2},
            "rollout": {"max_staleness": 0, "max_new_tokens": 8, "max_tokens": 256, "poll_s": 0.02, "max_retries": 0},
            "evaluation": {"tasks": 1, "samples_per_task": 1},
            "environment": {"name": f"{__name__}:build", "options": {"api_key_env": "USER_MODEL_KEY"}},
        }
    )


def check(*expected: str) -> None:
    assert {who for who, _ in seen} >= set(expected)
    assert [(who, names - set(WANTED)) for who, names in seen if names != set(WANTED)] == []
    assert {**os.environ, **SECRETS, **WANTED} == dict(os.environ), "the rest of the process has them again"


def test_the_launcher_shows_none_while_it_checks_the_environment(config: RunConfig) -> None:
    task_checks.heldout_tasks(config)
    task_checks.training_tasks(config)
    check("build", "size")


def test_demonstrations_are_built_without(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environments.DEMONSTRATIONS, config.environment.name, f"{__name__}:demonstrate")
    chat = ChatFormat(config.model.path, {})
    assert environments.build_demonstrations(config.environment, 1, 0, chat) == []
    check("demonstrate")


def test_the_rollout_shows_none(config: RunConfig) -> None:
    async def scenario() -> None:
        async with ScriptedEngine(6) as engine:
            config.run_path.mkdir(parents=True)
            write_roster(RunFiles(config.run_path).root, [Engine(0, engine.url)])
            with Bank.open(config.bank_url) as bank:
                rollout = asyncio.create_task(process.run(config))
                while bank.counts()[State.FINISHED] < 2:
                    assert not rollout.done(), rollout.exception()
                    await asyncio.sleep(0.02)
                bank.set_state("phase", "finished")
                await rollout

    asyncio.run(scenario())
    check("build", "task", "environment", "reset", "step", "reward", "close")


def test_evaluations_show_none(config: RunConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ScriptedEngine(6) as engine:
            await asyncio.to_thread(evaluate_engines, config, [engine.url], folder=tmp_path / "engines")

    asyncio.run(scenario())
    check("build", "task", "environment", "reset", "step", "reward", "close")


def test_evaluations_of_an_endpoint_show_none_and_the_endpoint_has_its_key(config: RunConfig, tmp_path: Path) -> None:
    options = endpoint_options(config, "http://127.0.0.1:1/v1", "m", "WANDB_API_KEY")
    with pytest.raises(UserError):  # nobody listens on port 1; the environment was asked first
        evaluate_endpoint(config, options, tmp_path / "endpoint")
    check("build", "task", "environment", "reset", "close")
