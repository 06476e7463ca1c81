"""One episode, driven step by step: the benchmark's own orchestrator with participants that say what they are told.

The benchmark's orchestrator asks its agent and its user for messages and blocks until it has them. Here both are
stand-ins that hand over a message prepared beforehand, so the caller decides when, and by whom, it is produced.

Invariants
- Who speaks next, which tool runs, what ends an episode and why is decided by the benchmark's code, not by ours; only
  its check of limits (part of its blocking `run`) is repeated here.
- Nothing in here waits or does input or output: an episode is a state machine that any event loop can host.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_async.rollout.environments.tau2.database import reading
from megatron_async.rollout.environments.tau2.domain import Domain
from megatron_async.rollout.environments.tau2.package import Package

ChatMessage = dict[str, Any]
"""A message as the OpenAI chat API knows it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a participant says: text, tool calls as (name, arguments), or both."""

    content: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class Pending:
    """Whom the episode waits for.

    turn: "agent", "user", or "done". messages: for the agent, what it has not seen yet; for the user, the whole
    conversation as the simulator's prompt has it (system prompt first, roles flipped). termination: why it is done.
    """

    turn: Literal["agent", "user", "done"]
    messages: list[ChatMessage] = field(default_factory=list)
    termination: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The benchmark's limits: messages, failed tool calls, and whether text beside a tool call is an error."""

    max_steps: int = 200
    max_errors: int = 10
    enforce_communication_protocol: bool = False


class Episode:
    """One episode of one task. Call `start`, then `agent` or `user`, as the returned `Pending` says."""

    def __init__(self, domain: Domain, task: Any, limits: Limits | None = None) -> None:
        self.domain = domain
        self.task = task
        limits = limits or Limits()
        package = domain.package
        agent_class, solo_class, user_class, dummy_class = _participants(package)
        self.environment = domain.environment()
        if domain.solo:
            self._agent = solo_class(
                tools=list(domain.tools), domain_policy=domain.policy, task=task, llm="policy"
            )
            self._user = dummy_class()
        else:
            self._agent = agent_class(tools=domain.tools, domain_policy=domain.policy, llm="policy")
            self._user = user_class(
                tools=domain.user_tools, instructions=str(task.user_scenario), llm="endpoint"
            )
        self.orchestrator = package.Orchestrator(
            domain=domain.name,
            agent=self._agent,
            user=self._user,
            environment=self.environment,
            task=task,
            max_steps=limits.max_steps,
            max_errors=limits.max_errors,
            solo_mode=domain.solo,
            validate_communication=limits.enforce_communication_protocol,
        )
        self._begun = False
        self._call_ids = itertools.count(1)

    # ------------------------------------------------------------------ what participants see

    @property
    def system_prompt(self) -> str:
        """The benchmark's system prompt for the agent (in solo mode with the ticket)."""
        prompt: str = self._agent.system_prompt
        return prompt

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The agent's tools as OpenAI function schemas (in solo mode with the one that ends the episode)."""
        return self.domain.schemas("agent", self._agent.tools)

    def user_tool_schemas(self) -> list[dict[str, Any]]:
        """The user's tools, empty where the domain has none."""
        return self.domain.schemas("user", self.domain.user_tools or [])

    # ------------------------------------------------------------------ driving

    def start(self) -> Pending:
        """Begin. The agent's first messages include the benchmark's greeting, which is not the agent's."""
        history = self.task.initial_state is not None and self.task.initial_state.message_history
        if self.domain.solo and not history:
            return Pending("agent")  # the orchestrator asks for the first message while it initialises itself
        self._initialise()
        pending = self._advance()
        if pending.turn == "agent":
            return self._with_history(pending)
        return pending

    def agent(self, said: Said) -> Pending:
        """The agent's message; returns whom the episode waits for next. ValueError for an empty message."""
        self._agent.prepared = self._message("assistant", said)
        if not self._begun:
            self._initialise()
        else:
            self._step()
        return self._advance()

    def user(self, said: Said) -> Pending:
        """The user's message. ValueError for an empty one."""
        first = not self._agent_has_spoken()
        self._user.prepared = self._message("user", said)
        self._step()
        pending = self._advance()
        return self._with_history(pending) if first and pending.turn == "agent" else pending

    def fail_agent(self, text: str) -> Pending:
        """End the episode as the agent's error: it said something that is neither text nor a readable tool call."""
        if not self._begun and not self.domain.solo:
            raise RuntimeError("fail_agent before start")
        if text.strip():
            message = self.domain.package.AssistantMessage(role="assistant", content=text, cost=0.0)
            self.orchestrator.trajectory.append(message)
        self._end("AGENT_ERROR")
        return self._pending()

    # ------------------------------------------------------------------ outcome

    @property
    def termination(self) -> str | None:
        """The benchmark's reason why the episode is over, or None."""
        reason = self.orchestrator.termination_reason
        return None if reason is None else str(reason.value)

    @property
    def messages(self) -> list[Any]:
        """The benchmark's messages so far, in order (not copies)."""
        return list(self.orchestrator.trajectory)

    @property
    def steps(self) -> int:
        """Messages passed so far, as the benchmark counts them."""
        return int(self.orchestrator.step_count)

    @property
    def tool_errors(self) -> int:
        """Failed tool calls so far, as the benchmark counts them."""
        return int(self.orchestrator.num_errors)

    def transcript(self) -> list[dict[str, Any]]:
        """The messages as JSON, numbered, in the benchmark's own format."""
        dumped = []
        for index, message in enumerate(self.messages):
            numbered = message.model_copy(update={"turn_idx": index})
            dumped.append(json.loads(numbered.model_dump_json()))
        return dumped

    # ------------------------------------------------------------------ inside

    def _initialise(self) -> None:
        self._begun = True
        self.orchestrator.initialize()

    def _step(self) -> None:
        calls = self.orchestrator.message.tool_calls if self._to("ENV") else ()
        if calls and self.domain.only_reads(calls):
            with reading(self.environment.tools.db, *self._user_databases()):
                self.orchestrator.step()
        else:
            self.orchestrator.step()
        self._check_limits()

    def _user_databases(self) -> list[Any]:
        return [] if self.environment.user_tools is None else [self.environment.user_tools.db]

    def _check_limits(self) -> None:
        """As the benchmark's `run` does after each step: never while a tool call waits for its result."""
        orchestrator = self.orchestrator
        if self._to("ENV"):
            return
        if orchestrator.step_count >= orchestrator.max_steps:
            self._end("MAX_STEPS")
        if orchestrator.num_errors >= orchestrator.max_errors:
            self._end("TOO_MANY_ERRORS")

    def _advance(self) -> Pending:
        while not self.orchestrator.done and self._to("ENV"):
            self._step()
        return self._pending()

    def _pending(self) -> Pending:
        if self.orchestrator.done:
            return Pending("done", termination=self.termination)
        if self._to("USER"):
            return Pending("user", self._user_prompt())
        return Pending("agent", _chat_messages(self.domain.package, [self.orchestrator.message]))

    def _user_prompt(self) -> list[ChatMessage]:
        state = self.orchestrator.user_state
        package = self.domain.package
        heard = state.model_copy(
            update={"messages": state.messages + _flat(package, self.orchestrator.message)}
        )
        return _chat_messages(package, state.system_messages + heard.flip_roles())

    def _with_history(self, pending: Pending) -> Pending:
        """Put what was said before the agent's first turn (the greeting, a task's history) in front."""
        history = _chat_messages(self.domain.package, self.orchestrator.agent_state.messages)
        return Pending("agent", history + pending.messages)

    def _agent_has_spoken(self) -> bool:
        return bool(self._agent.spoken)

    def _message(self, role: Literal["assistant", "user"], said: Said) -> Any:
        package = self.domain.package
        calls = [
            package.ToolCall(
                id=f"call_{next(self._call_ids)}", name=name, arguments=arguments, requestor=role
            )
            for name, arguments in said.calls
        ]
        if not calls and not said.content.strip():
            raise ValueError(f"tau2: the {role}'s message is empty")
        kind = package.AssistantMessage if role == "assistant" else package.UserMessage
        return kind(role=role, content=said.content or None, tool_calls=calls or None, cost=0.0)

    def _to(self, role: str) -> bool:
        return bool(self._begun) and self.orchestrator.to_role == getattr(self.domain.package.Role, role)

    def _end(self, reason: str) -> None:
        self.orchestrator.done = True
        self.orchestrator.termination_reason = getattr(self.domain.package.TerminationReason, reason)


def _flat(package: Package, message: Any) -> list[Any]:
    if message is None:
        return []
    return list(message.tool_messages) if isinstance(message, package.MultiToolMessage) else [message]


def _chat_messages(package: Package, messages: Sequence[Any]) -> list[ChatMessage]:
    """The benchmark's messages as the chat API has them."""
    result: list[ChatMessage] = []
    for message in itertools.chain.from_iterable(_flat(package, message) for message in messages):
        entry: ChatMessage = {"role": message.role, "content": message.content or ""}
        if message.role == "tool":
            entry["tool_call_id"] = message.id
        elif message.role == "assistant" and message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in message.tool_calls
            ]
        result.append(entry)
    return result


@functools.cache
def _participants(package: Package) -> tuple[Any, Any, Any, Any]:
    """(agent, solo agent, user, nobody): the benchmark's classes, except that messages are prepared by the caller."""

    agent_base: Any = package.LLMAgent
    solo_base: Any = package.LLMSoloAgent
    user_base: Any = package.UserSimulator

    class PreparedAgent(agent_base):
        prepared: Any = None
        spoken = 0

        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            return _hand_over(self), state

    class PreparedSoloAgent(solo_base):
        prepared: Any = None
        spoken = 0

        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            said = _hand_over(self)
            return (self._check_if_stop_toolcall(said) if said.is_tool_call() else said), state

    class PreparedUser(user_base):
        prepared: Any = None
        spoken = 0

        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            said = _hand_over(self)
            state.messages.extend([*_flat(package, message), said])
            return said, state

    return PreparedAgent, PreparedSoloAgent, PreparedUser, package.DummyUser


def _hand_over(participant: Any) -> Any:
    said = participant.prepared
    if said is None:
        raise RuntimeError("tau2: the benchmark asked a participant for a message that nobody prepared")
    participant.prepared = None
    participant.spoken += 1
    return copy.copy(said)
