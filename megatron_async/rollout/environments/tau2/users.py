"""Who plays the user: the benchmark's simulator prompt on an endpoint, a script, or a recording.

Invariants
- A user only turns the conversation so far into what the user says next; what that does to the episode is decided by
  the benchmark's code in `episode`.
- A user that cannot answer raises `EnvironmentFailure`: the episode is no wrong answer, it is no answer.
- The agent hears what a user says, never what it thinks, and never half of it.
"""

from __future__ import annotations

import json
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


class RecordedUser:
    """Says the user messages of a recorded conversation, in order, whatever it hears."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._lines = [
            Said(
                message.get("content") or "",
                tuple((call["name"], call["arguments"]) for call in message.get("tool_calls") or ()),
            )
            for message in messages
            if message["role"] == "user"
        ]
        self._next = 0

    async def answer(self, conversation: list[ChatMessage], tools: list[dict[str, Any]]) -> Said:
        if self._next >= len(self._lines):
            raise EnvironmentFailure(
                f"the recording has {len(self._lines)} user messages and the conversation needs another: it has taken "
                "another course"
            )
        self._next += 1
        return self._lines[self._next - 1]

    async def close(self) -> None:
        """Nothing is held."""


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
