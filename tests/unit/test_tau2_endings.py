"""Endings by the participants themselves are those of the benchmark's own orchestrator, and so are their rewards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_async.rollout.environments.base import EnvironmentFailure
from megatron_async.rollout.environments.tau2.episode import Said
from tests.unit.tau2_support import altered, play, requires_tau2, sample_ids
from tests.unit.test_tau2_episode import benchmark_run, environment_of, source_of

pytestmark = requires_tau2

AIRPLANE = (("toggle_airplane_mode", {}),)
LOOK = Said(calls=(("get_customer_by_phone", {"phone_number": "555-123-2002"}),))


class Lines:
    """A user that says these lines, in order."""

    def __init__(self, *lines: Said) -> None:
        self._lines = iter(lines)

    async def answer(self, conversation: Any, tools: Any) -> Said:
        return next(self._lines)

    async def close(self) -> None:
        """Nothing is held."""


def ended(solo: bool, turns: list[Said], user: Lines | None = None, **options: Any) -> tuple[float, str]:
    """(reward, ending), which the benchmark's own run on the same messages has too."""
    source = source_of("telecom", solo, **options)
    task_id = sample_ids("telecom", 1, solo)[0]
    environment = environment_of(source, task_id)
    environment._user = user
    reward, info = asyncio.run(play(environment, turns))
    enforced = options.get("enforce_communication_protocol", False)
    task = source.context.domain.tasks[task_id]
    theirs = benchmark_run("telecom", solo, task, info["transcript"], validate_communication=enforced)
    assert info["termination"] == theirs.termination_reason.value
    assert len(info["transcript"]) == len(theirs.messages)
    return reward, info["termination"]


@pytest.mark.parametrize(("enforced", "ending"), [(True, "user_error"), (False, "user_stop")])
def test_text_beside_a_call_of_the_user(enforced: bool, ending: str) -> None:
    user = Lines(Said("Help me."), Said("One moment.", AIRPLANE), Said("###STOP###"))
    turns = [Said("Switch the airplane mode off.")]
    assert ended(False, turns, user, enforce_communication_protocol=enforced) == (0.0, ending)


def test_a_user_whose_first_words_break_the_protocol_is_no_reward() -> None:
    user = Lines(Said("Help me.", AIRPLANE))
    with pytest.raises(EnvironmentFailure, match="ended before the agent's first turn .user_error."):
        ended(False, [], user, enforce_communication_protocol=True)


@pytest.mark.parametrize("stop", [Said(calls=(("done", {}),)), Said("###STOP###")])
def test_the_agents_stop_can_be_rewarded(stop: Said) -> None:
    task_id = sample_ids("telecom", 1, True)[0]
    gold = altered(source_of("telecom", True).context.domain.tasks[task_id], "gold", True)
    assert ended(True, [*gold[:-1], stop]) == (1.0, "agent_stop")
    assert ended(True, [stop]) == (0.0, "agent_stop")


@pytest.mark.parametrize("before", [[], [LOOK]])
def test_a_solo_turn_without_a_call_is_the_agents_error(before: list[Said]) -> None:
    assert ended(True, [*before, Said("Let me think about it.")]) == (0.0, "agent_error")
