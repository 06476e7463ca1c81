"""A policy behind any OpenAI-compatible chat endpoint, for evaluation only: messages in, messages out, no tokens.

Invariants
- The policy's mistakes are its own: a tool call that cannot be read becomes a turn with a `parse_error`, an answer cut
  by the limit on tokens ends the episode as for engines, and neither is asked for again.
- A conversation that the server refuses for its length is cut (`context_length`) and rewarded as any that a limit cut:
  left out, the long episodes would leave the rate to the short ones.
- What else the endpoint or the environment fails at ends the episode as a failure, never as a reward. Calls of the
  environment are those of engines' episodes (`environment_calls`).
- Results go back under the id of the call they answer; the reasoning of earlier turns is not sent again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from megatron_async.config.schema import RunConfig
from megatron_async.credentials import hidden_credentials
from megatron_async.errors import UserError
from megatron_async.rollout import environment_answers, environment_calls
from megatron_async.rollout.blocking import Call
from megatron_async.rollout.chat_endpoint import (
    ChatEndpoint,
    Completion,
    EndpointError,
    EndpointOptions,
    EndpointRefused,
)
from megatron_async.rollout.environment_calls import EpisodeFailure
from megatron_async.rollout.environments import build_task_source
from megatron_async.rollout.environments.base import (
    AssistantTurn,
    Environment,
    Message,
    Task,
    TaskSource,
    ToolCall,
)
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.rollout.evaluation import Player, journalled, run_blocking
from megatron_async.rollout.evaluation_episode import EvaluatedEpisode
from megatron_async.rollout.evaluation_statistics import EvaluationResult
from megatron_async.rollout.evaluation_subject import Subject, conditions, without_password
from megatron_async.trajectory import Status

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONTEXT_LENGTH = "context_length"
"""The ending of an episode whose conversation the server refused for its length."""

_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size|limit)|max(imum)?[ _-](context|model|sequence|input|prompt)[ _-]len"
    r"|longer than the (model|max)|too many (\w+ )?tokens|reduce the length"
    r"|(prompt|input|inputs|request|conversation|messages?) (is|are) too (long|large)",
    re.IGNORECASE,
)
"""What servers say of a conversation that does not fit the model."""
_SPEAKS_OF_LENGTH = re.compile(r"context|length|token|too (long|large)", re.IGNORECASE)
"""Words in other messages that mean the same when an earlier request of the conversation was answered."""


def endpoint_options(config: RunConfig, url: str, model: str, api_key_env: str) -> EndpointOptions:
    """The endpoint as the configuration samples: temperature of evaluations, tokens and time of one turn."""
    rollout = config.rollout
    sampling: dict[str, Any] = {
        "temperature": config.evaluation.temperature,
        "max_tokens": rollout.max_new_tokens,
    }
    if rollout.top_p < 1.0:
        sampling["top_p"] = rollout.top_p
    if rollout.chat_template_options:
        sampling["chat_template_kwargs"] = dict(rollout.chat_template_options)
    return EndpointOptions(
        url=url,
        model=model,
        api_key_env=api_key_env,
        timeout_s=rollout.turn_deadline_s,
        retries=rollout.max_retries,
        concurrency=rollout.concurrency,
        sampling=sampling,
    )


def evaluate_endpoint(config: RunConfig, options: EndpointOptions, folder: Path) -> EvaluationResult:
    """Evaluate as `config.evaluation` says, the policy being an endpoint; results go to `folder`.

    Raises ValueError when the variable with the key is not set, UserError as `evaluation.evaluate`.
    """
    endpoint = ChatEndpoint(options)
    with hidden_credentials(config.environment):  # the endpoint has its key
        return _evaluate(config, endpoint, folder)


def _evaluate(config: RunConfig, endpoint: ChatEndpoint, folder: Path) -> EvaluationResult:
    options = endpoint.options
    source = build_task_source(config.environment, "heldout", config.seed)
    limits = EpisodeLimits.from_config(config)
    subject = Subject(
        kind="endpoint",
        model=options.model,
        place=without_password(options.url),
        sampling=dict(options.sampling),
        limits=limits.of_policy(),
        seed=config.seed,
    )
    asked = asdict(replace(options, concurrency=0))  # how many at once changes no answer
    same = conditions(config, source, subject, endpoint=asked, waits=asdict(limits))
    play = endpoint_player(endpoint, source, limits)

    def check(result: EvaluationResult) -> None:
        if result.turns == 0 and set(result.endings) == {CONTEXT_LENGTH}:
            raise UserError(
                f"{without_password(options.url)} refused the first request of every episode for its length: lower "
                f"rollout.max_new_tokens ({config.rollout.max_new_tokens}), or serve the model with a longer context"
            )

    work = journalled(config, play, source, subject, same, folder, check)
    return run_blocking(work, config.rollout.turn_deadline_s)


def endpoint_player(endpoint: ChatEndpoint, source: TaskSource, limits: EpisodeLimits) -> Player:
    """Plays episodes of `source` with the policy behind `endpoint`."""

    async def play(task: Task, sample: str) -> EvaluatedEpisode:
        making = Call(source, "environment", task=task.task_id)
        try:
            environment = environment_calls.make(making, partial(source.environment, task))
        except EpisodeFailure as failure:
            return EvaluatedEpisode(None, failure.kind)
        async with endpoint.session() as session:
            return await _Episode(endpoint, session, environment, limits).run(task.task_id)

    return play


class _Episode:
    def __init__(
        self,
        endpoint: ChatEndpoint,
        session: aiohttp.ClientSession,
        environment: Environment,
        limits: EpisodeLimits,
    ) -> None:
        self._endpoint, self._session = endpoint, session
        self._environment, self._limits = environment, limits
        self._messages: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] = []
        self._ids = itertools.count(1)
        self._asked: list[str] = []  # ids of the calls whose results are still to come
        self._tokens = self._turns = self._unmetered = 0

    async def run(self, name: str) -> EvaluatedEpisode:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._limits.trajectory_deadline_s):
                ending = await self._play()
                answer = await self._ask("reward", self._environment.reward)
                reward, info = environment_answers.reward(answer)
        except EpisodeFailure as failure:
            logger.warning("evaluation of %s: %s: %s", name, failure.kind, failure)
            return self._episode(None, failure.kind, {}, started)
        except TimeoutError:
            logger.warning("evaluation of %s: trajectory_deadline", name)
            return self._episode(None, "trajectory_deadline", {}, started)
        finally:
            await environment_calls.close(
                Call(self._environment, "close", name), self._environment, self._limits.turn_deadline_s
            )
        return self._episode(reward, ending, info, started)

    def _episode(
        self, reward: float | None, ending: str, info: dict[str, Any], started: float
    ) -> EvaluatedEpisode:
        return EvaluatedEpisode(
            reward=reward,
            ending=ending,
            info=info,
            truncated=reward is not None and ending != "done",
            tokens=self._tokens,
            turns=self._turns,
            seconds=time.monotonic() - started,
            unmetered=self._unmetered,
        )

    async def _play(self) -> str:
        start = environment_answers.start(await self._ask("reset", self._environment.reset))
        self._tools = start.tools
        self._hear(start.messages)
        while True:
            completion = await self._answer()
            if completion is None:
                return CONTEXT_LENGTH
            self._count(completion)
            if completion.finish_reason == "length":
                return "max_new_tokens"
            call = partial(self._environment.step, self._turn(completion))
            step = environment_answers.step(await self._ask("step", call))
            if step.done:
                return "environment_truncated" if step.truncated else "done"
            if self._turns >= self._limits.max_turns:
                return "max_turns"
            environment_answers.check_observation(step.messages)
            if completion.prompt_tokens + completion.completion_tokens >= self._limits.max_tokens:
                return "max_tokens"
            self._tools = [*self._tools, *step.added_tools]
            self._hear(step.messages)

    def _count(self, completion: Completion) -> None:
        self._turns += 1
        self._tokens += completion.completion_tokens
        self._unmetered += completion.prompt_tokens + completion.completion_tokens == 0

    async def _answer(self) -> Completion | None:
        """The policy's next turn; None when the server refuses the conversation for its length."""
        try:
            return await self._endpoint.complete(
                self._session, self._messages, self._tools, lambda completion: completion
            )
        except EndpointRefused as error:
            if not too_long(error, self._turns):
                raise EpisodeFailure(Status.ENGINE_ERROR, "endpoint_failure", str(error)) from error
            logger.info("cut after %d turns: %s", self._turns, error)
            return None
        except EndpointError as error:
            raise EpisodeFailure(Status.ENGINE_ERROR, "endpoint_failure", str(error)) from error

    async def _ask(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        named = Call(self._environment, what)
        return await environment_calls.ask(named, call, self._limits.turn_deadline_s)

    def _turn(self, completion: Completion) -> AssistantTurn:
        """What the endpoint said, also put into the conversation."""
        calls = [
            ToolCall(name, arguments, f"call_{next(self._ids)}") for name, arguments in completion.calls
        ]
        self._asked = [call.id for call in calls]
        self._messages.append(_said(completion.content, calls))
        problem = completion.problem
        if problem is None and not calls and not completion.content.strip():
            problem = "the turn is empty"
        return AssistantTurn(completion.content.strip(), tuple(calls), problem)

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.role == "tool":
                known = self._asked.pop(0) if self._asked else f"call_{next(self._ids)}"
                self._messages.append({"role": "tool", "tool_call_id": known, "content": message.content})
            elif message.role == "assistant":
                self._messages.append(_said(message.content, message.tool_calls))
                self._asked = [call.id for call in message.tool_calls]
            else:
                self._messages.append({"role": message.role, "content": message.content})


def too_long(refusal: EndpointRefused, turns: int) -> bool:
    """Whether the server refuses a conversation for its length. turns: of it that were answered before.

    Servers word this as they like, and some of their words ("tokens") occur in refusals of other kinds too: these count
    only once the same conversation has been answered, when nothing but its length has changed.
    """
    if refusal.status not in (400, 413, 422):
        return False
    if _TOO_LONG.search(refusal.answer):
        return True
    return turns > 0 and (refusal.status == 413 or bool(_SPEAKS_OF_LENGTH.search(refusal.answer)))


def _said(content: str, calls: Iterable[ToolCall]) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": "assistant", "content": content}
    written = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in calls
    ]
    return {**entry, "tool_calls": written} if written else entry
