"""What goes over the socket between a rollout and the process that holds its environments.

One connection per episode, and one for the tasks. Each message is one line of JSON: a request {"call": NAME, ...} is
answered by {"result": ...} or {"error": KIND, "message": TEXT}, in order; a failure of the environment also has the
"kind" that it is counted by.

Invariants
- JSON only: nothing that is received is ever executed or unpickled.
- The kinds of error are those that the interface of environments knows; anything else is "bug".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_async.errors import MissingHere, UserError
from megatron_async.rollout.environments.base import (
    AssistantTurn,
    EnvironmentFailure,
    Message,
    Outcome,
    Start,
    Step,
    Task,
    ToolCall,
)

LINE_LIMIT = 64 * 2**20
"""Longest message in bytes; a transcript of two hundred messages takes about one MiB."""

_ERRORS: dict[str, type[Exception]] = {
    "environment_failure": EnvironmentFailure,
    "missing_here": MissingHere,
    "user": UserError,
    "value": ValueError,
    "index": IndexError,
    "bug": EnvironmentFailure,
}


def encode(value: Mapping[str, Any]) -> bytes:
    """One line."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """What a line says; ValueError for anything but a JSON object."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object: {line[:100]!r}")
    return value


def failure(error: BaseException) -> dict[str, Any]:
    """The answer that raises `error` on the other side."""
    kinds = (
        ("environment_failure", EnvironmentFailure),
        ("missing_here", MissingHere),
        ("user", UserError),
        ("index", IndexError),
        ("value", ValueError),
    )
    kind = next((name for name, type_ in kinds if isinstance(error, type_)), "bug")
    text = f"{type(error).__name__}: {error}" if kind == "bug" else str(error)
    counted = {"kind": error.kind} if isinstance(error, EnvironmentFailure) else {}
    return {"error": kind, "message": text, **counted}


def result_of(answer: Mapping[str, Any], where: str) -> Any:
    """The result of an answer; raises the error that it carries, with `where` it came from."""
    if "error" in answer:
        message = f"{answer['message']} (in {where})"
        if "kind" in answer:
            raise EnvironmentFailure(message, answer["kind"])
        raise _ERRORS[answer["error"]](message)
    return answer["result"]


# ------------------------------------------------------------------ values


def message_from(value: Mapping[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in value["tool_calls"])
    return Message(value["role"], value["content"], calls, value["reasoning"])


def start_from(value: Mapping[str, Any]) -> Start:
    return Start([message_from(message) for message in value["messages"]], value["tools"])


def step_from(value: Mapping[str, Any]) -> Step:
    messages = [message_from(message) for message in value["messages"]]
    return Step(messages, value["done"], value["truncated"], value["added_tools"])


def turn_from(value: Mapping[str, Any]) -> AssistantTurn:
    calls = tuple(ToolCall(**call) for call in value["tool_calls"])
    return AssistantTurn(value["content"], calls, value["parse_error"], value["reasoning"])


def outcome_from(value: Mapping[str, Any]) -> Outcome:
    return Outcome(**{**value, "task": Task(**value["task"])})


def as_json(value: AssistantTurn | Start | Step | Task | Outcome) -> dict[str, Any]:
    """A value of the interface as JSON; the functions above make it again."""
    return asdict(value)
