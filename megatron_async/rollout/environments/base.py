"""What an environment is: messages in, messages out, a reward at the end.

Invariants
- An environment sees *parsed* turns and returns *messages*; it never sees token ids. `rollout.chat.ChatFormat` is the
  only place where messages become tokens.
- The policy's mistakes (a malformed tool call, an unknown tool, rude words) are part of the episode: `step` answers
  them or ends the episode, and the reward says what they cost. The environment's own failures raise
  `EnvironmentFailure`; they become a trajectory status and never a reward.
- `reward` is a pure function of the episode so far: it may be asked for once, after the last step, whether the
  environment ended the episode (`Step.done`) or the agent loop cut it (turn, token or time limit).
- A `Task` is plain JSON: it can be stored in the bank and rebuilt in another process by `TaskSource.environment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "heldout"]


class EnvironmentFailure(RuntimeError):
    """The environment itself failed (a tool server is down, a user simulator timed out, a database is corrupt).

    Raised from any method of `Environment`. The episode ends with status `environment_error`, is counted by `kind`, and
    is excluded from the loss: a failure is not a reward of 0. kind: a short name, where a report should tell a failure
    from others.
    """

    def __init__(self, message: str = "", kind: str = "environment_failure") -> None:
        self.kind = kind
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool: its name, its JSON arguments, and an id where the chat format has one."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as chat templates know it.

    `tool_calls` and `reasoning` belong to assistant messages only. A `tool` message holds the result of one call.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """What the policy said in one turn, parsed from its tokens.

    `content` is the text outside reasoning and tool calls, stripped. `parse_error` says in a sentence what was
    malformed, or is None; `tool_calls` then holds the calls that could still be read.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    parse_error: str | None = None
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """How an episode begins: the messages before the policy's first turn, and the tools as OpenAI function schemas."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to one turn.

    `messages` are the observations to append (empty when nothing follows). `done` ends the episode; `truncated` says
    that it ended by a limit of the environment's own, so that the last state is not terminal. `added_tools` are
    functions that may be called from now on; the messages must say so too, as a prompt of tokens keeps the tools it
    began with: only a policy behind a chat endpoint is also given the longer list.
    """

    messages: list[Message]
    done: bool
    truncated: bool = False
    added_tools: list[dict[str, Any]] = field(default_factory=list)


@runtime_checkable
class Environment(Protocol):
    """One episode of one task. Not shared between episodes; methods are called one at a time."""

    async def reset(self) -> Start:
        """Begin the episode. Called once."""

    async def step(self, turn: AssistantTurn) -> Step:
        """Answer one policy turn. Not called again after `done`."""

    async def reward(self) -> tuple[float, dict[str, Any]]:
        """(reward, info): info is JSON and says why, e.g. which part of the success criterion failed."""

    async def close(self) -> None:
        """Release what the episode holds. Called exactly once, also after a failure."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task: a stable id, unique over both splits, and everything needed to rebuild its environment (JSON).

    An environment that has the same task under several ids (modes, say) gives each the same `data["identity"]`: what a
    policy was trained on is compared with what it is evaluated on by that.
    """

    task_id: str
    data: dict[str, Any]


@runtime_checkable
class TaskSource(Protocol):
    """Tasks of one split, addressed by index, so that a restarted run goes on where it stopped.

    `size` is the number of distinct tasks, or None for an endless source. `task(i)` is deterministic; for a finite
    source, an index past the end raises IndexError and the caller decides whether to start over.
    """

    split: Split

    @property
    def size(self) -> int | None:
        """Number of distinct tasks; None when endless."""

    def task(self, index: int) -> Task:
        """The task with this index, index >= 0."""

    def environment(self, task: Task) -> Environment:
        """A fresh environment for one episode of `task`."""


@runtime_checkable
class ReplayableTaskSource(TaskSource, Protocol):
    """A source some of whose environments may be played again from the start after the rollout process was killed.

    Only where the same turns get the same answers, and where repeating them changes nothing outside the environment.
    Recorded turns are then given to a fresh environment and sampling goes on after them; elsewhere the episode is lost
    and started anew.
    """

    def replayable(self, task: Task) -> bool:
        """Whether environments of this task can be replayed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished evaluation episode, for a benchmark's own report.

    sample: its number among the episodes of the task. info: what `Environment.reward` said. tokens, turns: of the
    policy. seconds: time spent waiting for the engine and the environment.
    """

    task: Task
    sample: int
    reward: float
    info: dict[str, Any]
    tokens: int
    turns: int
    seconds: float


@runtime_checkable
class ReportingTaskSource(TaskSource, Protocol):
    """A source of tasks that reports in a benchmark's own terms, beside what every evaluation reports."""

    def report(self, outcomes: Sequence[Outcome], samples: int, folder: Path) -> dict[str, Any]:
        """Write the benchmark's result files into `folder` (it exists); returns JSON for the evaluation's row."""


@runtime_checkable
class DescribedTaskSource(TaskSource, Protocol):
    """A source that says which tasks it has, for the record of what a checkpoint was trained on."""

    def described(self) -> dict[str, Any]:
        """JSON without paths, addresses and credentials: it is published with the weights."""


@runtime_checkable
class NamedTaskSource(TaskSource, Protocol):
    """A source that names what it holds, so that results on different tasks lie in different folders."""

    def folder_name(self) -> str:
        """Short, e.g. "tau2-retail-test": the environment with what tells its sets of tasks apart; "" for no name."""


@runtime_checkable
class LabelledTaskSource(TaskSource, Protocol):
    """A source that says what makes its numbers incomparable with those of others on the same benchmark."""

    def labels(self) -> dict[str, str]:
        """What is unusual, by a short name, for every result; empty when nothing is."""
