"""What an environment answers, checked before anything is made of it.

Invariant: an answer that is none (a reward that is no finite number, messages without text) is the environment's
failure, as an exception is. It ends its episode and no other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_async.rollout.environment_calls import EpisodeFailure
from megatron_async.rollout.environments.base import Message, Start, Step
from megatron_async.trajectory import Status

_INT64 = 2**63


def start(answer: Start) -> Start:
    """What `reset` answered. Raises EpisodeFailure."""
    try:
        good = isinstance(answer.tools, list) and _are_messages(answer.messages)
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
    except (TypeError, ValueError) as error:
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


def readable(info: object) -> dict[str, Any]:
    """Words for people, as JSON: what JSON cannot hold (arrays of NumPy, NaN, huge integers) becomes text.

    A policy can make an environment repeat its arguments, so none of these is worth a failure of the episode.
    """
    try:
        text = json.dumps(info, default=_plain, ensure_ascii=False).encode("utf-8", "replace")
        value = json.loads(text, parse_int=_integer, parse_constant=str)
    except (TypeError, ValueError, RecursionError) as error:
        return {"unreadable": f"{type(error).__name__}: {error}"}
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"value": value}


def _plain(value: object) -> object:
    item = getattr(value, "item", None)  # a NumPy scalar
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else repr(value)


def _integer(digits: str) -> int | str:
    try:
        value = int(digits)
    except ValueError:  # thousands of digits
        return digits
    return value if -_INT64 <= value < 2 * _INT64 else digits


def _are_messages(messages: Iterable[Message]) -> bool:
    return all(isinstance(message.role, str) and isinstance(message.content, str) for message in messages)


def _bad(method: str, answer: object, wanted: str) -> EpisodeFailure:
    message = f"{method} answered {answer!r:.200}; wanted {wanted}"
    return EpisodeFailure(Status.ENVIRONMENT_ERROR, "bad_answer", message)
