"""Who plays the user: the benchmark's simulator prompt on an endpoint, a script, or a recording.

Invariants
- A user only turns the conversation so far into what the user says next; what that does to the episode is decided by
  the benchmark's code in `episode`.
- A user that cannot answer raises `EnvironmentFailure`: the episode is no wrong answer, it is no answer.
- The agent hears what a user says, never what it thinks, and never half of it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from megatron_async.rollout.chat_endpoint import ChatEndpoint, Completion, EndpointError, well_formed
from megatron_async.rollout.environments.base import EnvironmentFailure
from megatron_async.rollout.environments.tau2.episode import ChatMessage, Said

STOP = "###STOP###"
"""What the benchmark's users say when they are done."""

FAILED = "user_failure"
"""What failures are counted by where a user's model gave no usable answer."""

ASKING = "Please do this on your side: "
CLOSING = "That is everything."

_SHOWN = 120
"""Characters that an error shows of a text, around the first difference."""


class User(Protocol):
    """One user of one episode."""

    async def answer(self, conversation: list[ChatMessage], tools: list[dict[str, Any]]) -> Said:
        """What the user says: `conversation` is the simulator's prompt, the user being its assistant."""

    async def close(self) -> None:
        """Release connections."""


@dataclass(slots=True)
class EndpointUser:
    """A language model with the benchmark's prompt.

    prompt_tokens, completion_tokens: what it has used so far. repeats: requests that had to be sent again.
    """

    endpoint: ChatEndpoint
    session: aiohttp.ClientSession | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    repeats: int = 0

    async def answer(self, conversation: list[ChatMessage], tools: list[dict[str, Any]]) -> Said:
        if self.session is None:
            self.session = self.endpoint.session()
        try:
            completion = await self.endpoint.complete(self.session, conversation, tools, _spoken, self._repeated)
        except EndpointError as error:
            raise EnvironmentFailure(f"user simulator: {error}", FAILED) from error
        self.prompt_tokens += completion.prompt_tokens
        self.completion_tokens += completion.completion_tokens
        return Said(completion.content, completion.calls)

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    def _repeated(self) -> None:
        self.repeats += 1


def _spoken(completion: Completion) -> Completion:
    """What the agent may hear of an answer. ValueError, which has it asked for again, for one that is cut or empty."""
    well_formed(completion)
    if completion.finish_reason == "length":
        raise ValueError("the user's answer was cut by a limit on tokens (user.endpoint.sampling.max_tokens)")
    said = replace(completion, content=_without_thoughts(completion.content))
    if not said.calls and not said.content.strip():
        raise ValueError("the user said nothing")
    return said


def _without_thoughts(text: str) -> str:
    """The text after a leading block of thoughts, which some servers leave in it; the opening mark may be missing, as
    templates write it in the prompt."""
    _, end, rest = text.partition("</think>")
    if not end and text.lstrip().startswith("<think>"):
        raise ValueError("the user's thoughts have no end")
    return rest.lstrip() if end else text


class ScriptedUser:
    """Does what it is told: "Please do this on your side: {call}" runs the call, "That is everything." ends.

    For tests, gold replays and demonstrations; an agent that speaks the same phrases is `gold_turns`.
    """

    def __init__(self, instructions: str) -> None:
        self._opening = f"Hello, I need help. {instructions[:200]}"

    async def answer(self, conversation: list[ChatMessage], tools: list[dict[str, Any]]) -> Said:
        heard = conversation[-1]
        if heard["role"] == "tool":
            return Said(f"I did it: {heard['content'][:200]}")
        text = heard["content"]
        if text.startswith(CLOSING):
            return Said(STOP)
        if text.startswith(ASKING):
            wish = json.loads(text[len(ASKING) :])
            return Said(calls=((wish["name"], wish["arguments"]),))
        return Said(self._opening)

    async def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One recorded message of the user. heard: (speaker, text) of all that the user heard since its last one."""

    heard: tuple[tuple[str, str], ...]
    said: Said


class RecordedUser:
    """Says the user messages of a recorded conversation, as long as it hears what the recorded user heard.

    What a user hears: the agent's words and the results of its own tools; never the agent's calls. The first difference
    raises `EnvironmentFailure`: what the recorded user would have said to other words nobody knows.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._lines = _lines(messages)

    async def answer(self, conversation: list[ChatMessage], tools: list[dict[str, Any]]) -> Said:
        # counted in what was said, not in calls of this method: a task's history has lines of the user too
        number = sum(message["role"] == "assistant" for message in conversation)
        if number >= len(self._lines):
            raise EnvironmentFailure(
                f"the recording has {len(self._lines)} user messages and the conversation needs another: it has taken "
                "another course"
            )
        line, heard = self._lines[number], _heard(conversation)
        if heard != line.heard:
            raise EnvironmentFailure(_difference(number + 1, line.heard, heard))
        return line.said

    async def close(self) -> None:
        """Nothing is held."""


def _lines(messages: Sequence[Mapping[str, Any]]) -> list[_Line]:
    lines: list[_Line] = []
    heard: list[tuple[str, str]] = []
    for message in messages:
        calls, text = message.get("tool_calls") or (), message.get("content") or ""
        if message["role"] == "user":
            said = Said(text, tuple((call["name"], call["arguments"]) for call in calls))
            lines.append(_Line(tuple(heard), said))
            heard = []
        elif message["role"] == "tool" and message.get("requestor") == "user":
            heard.append(("tool", text.strip()))
        elif message["role"] == "assistant" and not calls:
            heard.append(("agent", text.strip()))
    return lines


def _heard(conversation: Sequence[ChatMessage]) -> tuple[tuple[str, str], ...]:
    """What the user heard since it last spoke, in its prompt: there the agent is its user."""
    speakers = {"user": "agent", "tool": "tool"}
    since = list(itertools.takewhile(lambda message: message["role"] in speakers, reversed(conversation)))
    return tuple((speakers[message["role"]], message["content"].strip()) for message in reversed(since))


def _difference(number: int, expected: Sequence[tuple[str, str]], heard: Sequence[tuple[str, str]]) -> str:
    pairs = itertools.zip_longest(expected, heard, fillvalue=("nobody", ""))
    (speaker, wanted), (other, found) = next(pair for pair in pairs if pair[0] != pair[1])
    start = max(0, len(os.path.commonprefix([wanted, found])) - _SHOWN // 2)
    return (
        f"the conversation is not the recorded one: before its message {number} the recorded user heard {speaker}: "
        f"{_part(wanted, start)}; now it heard {other}: {_part(found, start)}"
    )


def _part(text: str, start: int) -> str:
    shown = text[start : start + _SHOWN]
    return repr(f"{'...' if start else ''}{shown}{'...' if start + _SHOWN < len(text) else ''}")


def load_recordings(path: str) -> dict[str, list[dict[str, Any]]]:
    """Messages by task id from a results file of the benchmark; the first simulation of each task.

    Raises ValueError when the file is missing or is not such a file.
    """
    try:
        results = json.loads(Path(path).read_text())
        recordings: dict[str, list[dict[str, Any]]] = {}
        for simulation in results["simulations"]:
            recordings.setdefault(simulation["task_id"], simulation["messages"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"tau2: {path} is not a results file of the benchmark ({error!r})") from error
    return recordings


def gold_turns(task: Any, solo: bool) -> list[Said]:
    """What an agent says that follows the task's gold actions, its user being a `ScriptedUser` (none in solo mode)."""
    criteria = task.evaluation_criteria
    turns = []
    for action in criteria.actions or []:
        if solo or action.requestor == "assistant":
            turns.append(Said(calls=((action.name, dict(action.arguments)),)))
        else:
            wish = json.dumps({"name": action.name, "arguments": action.arguments})
            turns.append(Said(ASKING + wish))
    if solo:
        return [*turns, Said(calls=(("done", {}),))]
    return [*turns, Said(" ".join([CLOSING, *(criteria.communicate_info or [])]))]
