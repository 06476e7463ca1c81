"""What an environment answers, checked before anything is made of it.

Invariant: an answer that is none (a reward that is no finite number, messages without text) is the environment's
failure, as an exception is. It ends its episode and no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_async.rollout.environment_calls import EpisodeFailure
from megatron_async.rollout.environments.base import Message, Start, Step
from megatron_async.rollout.readable import readable
from megatron_async.trajectory import Status


def start(answer: Start) -> Start:
    """What `reset` answered. Raises EpisodeFailure."""
    try:
        good = isinstance(answer.tools, list | tuple) and _are_messages(answer.messages)
    except (AttributeError, TypeError) as error:
        raise _bad("reset", answer, "a Start") from error
    if not good:
        raise _bad("reset", answer, "a Start with a list of tools, and messages whose role and content are text")
    return answer


def step(answer: Step) -> Step:
    """What `step` answered. Raises EpisodeFailure."""
    try:
        ends, _, _ = answer.done, answer.truncated, answer.added_tools
        good = _are_messages(answer.messages or () if ends else answer.messages)
    except (AttributeError, TypeError) as error:
        raise _bad("step", answer, "a Step") from error
    if not good:
        raise _bad("step", answer, "a Step with messages whose role and content are text")
    return answer


def reward(answer: tuple[float, dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    """What `reward` answered, its info made JSON that everybody can read. Raises EpisodeFailure."""
    try:
        value, info = answer
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _bad("reward", answer, "(a number, info)") from error
    if not math.isfinite(number):
        raise _bad("reward", answer, "(a finite number, info)")
    return number, readable(info)


def check_observation(messages: Sequence[Message]) -> None:
    """Raises EpisodeFailure for a step that returned neither messages nor done."""
    if not messages:
        raise EpisodeFailure(
            Status.ENVIRONMENT_ERROR,
            "no_observation",
            "step returned neither messages nor done: the policy has nothing to answer",
        )


def _are_messages(messages: Sequence[Message]) -> bool:
    """A list: of a generator, looking would leave nothing."""
    return isinstance(messages, list | tuple) and all(
        isinstance(message.role, str) and isinstance(message.content, str) for message in messages
    )


def _bad(method: str, answer: object, wanted: str) -> EpisodeFailure:
    message = f"{method} answered {answer!r:.200}; wanted {wanted}"
    return EpisodeFailure(Status.ENVIRONMENT_ERROR, "bad_answer", message)
