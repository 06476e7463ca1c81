"""One episode: a policy, an environment, and the trajectory that records them token by token.

Invariants
- Token ids are appended, never re-encoded: each request's ids begin with the ids of the request before it, and that
  is checked every turn.
- What a request returns is appended once, ids, log-probs and version spans together. Its final answer says which
  version sampled which token; streamed chunks are recorded before it only where that is certain (see `streaming`), and
  withdrawn when the answer turns out to be no good.
- An episode that was cut by a kill goes on where its trajectory ends, if a fresh environment, given the recorded turns,
  answers as it did; if it does not, `ReplayDiverged` is raised and nothing is appended.
- A partial response is continued with the rest of its budget. Over a weight update the engine either goes on by
  itself (the spans show two versions) or ends the request with finish_reason "abort", and prompt + partial ids are
  sent again.
- A failure is a status, never a reward: of the environment (`environment_error`), of the engines (`engine_error`),
  of time (`aborted`). A limit on turns or tokens is `truncated`: that is the policy's doing and is rewarded as usual.
- Every wait has a deadline whose message names what was waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from megatron_async.rollout import environment_answers, environment_calls
from megatron_async.rollout.blocking import Call
from megatron_async.rollout.environment_calls import EpisodeFailure
from megatron_async.rollout.environments.base import (
    AssistantTurn,
    Environment,
    Message,
)
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.rollout.sampling import turn_options
from megatron_async.rollout.streaming import Streamed
from megatron_async.trajectory import Status, Trajectory, TrajectoryError, Turn, VersionSpan
from sglang_bridge import (
    Chunk,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
    Generation,
    SamplingOptions,
    Span,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

_RETRY_PAUSE_S = 0.25
"""Pause before a request is repeated, times the number of failures so far: lets a pool notice a dead engine."""

_TRY_AGAIN = (408, 425, 429)
"""HTTP statuses below 500 that say "not now" rather than "not like this"."""


class Sampler(Protocol):
    """What the agent loop needs of `sglang_bridge.EnginePool`."""

    async def generate(
        self,
        input_ids: list[int],
        sampling: SamplingOptions,
        *,
        rid: str | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        return_routed_experts: bool = False,
        min_version: int = 0,
    ) -> Generation: ...


class Chat(Protocol):
    """What the agent loop needs of `rollout.chat.ChatFormat`."""

    stop_token_ids: tuple[int, ...]
    turn_end_id: int

    def initial_ids(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]: ...

    def observation_ids(self, messages: list[Message], *, closed: bool = True) -> list[int]: ...

    def parse(self, ids: list[int]) -> AssistantTurn: ...


class ReplayDiverged(Exception):
    """A recorded episode cannot go on: its environment, given the recorded turns, answered otherwise."""


@dataclass(slots=True)
class EpisodeProgress:
    """What an episode is doing, for whoever watches it, and what it has cost so far.

    waiting_for: what is being awaited right now. requests_sent, requests_returned: to engines, answers of any kind
    back; request_sent_at: the last one (Unix seconds). resubmissions: requests sent again after an abort.
    engine_failures: requests that failed and were repeated. retractions: times the engine put the request back in its
    queue. tokens: tokens sampled so far, streamed ones included. withdrawn: tokens that were recorded early and taken
    back. Seconds are wall time; blocked_s: for which
    the environment stopped the whole event loop. floor: version that the engines
    sample with at least, None if not known. lost: whether a version is none that the trainer's present one was made
    from, so that no engine will hold it again. streamed: the answer under way. origin: what became of the episode when
    the rollout was started again, for the trajectory's info; empty for one that was begun by this process.
    """

    waiting_for: str = "start"
    requests_sent: int = 0
    requests_returned: int = 0
    request_sent_at: float = 0.0
    resubmissions: int = 0
    engine_failures: int = 0
    retractions: int = 0
    tokens: int = 0
    withdrawn: int = 0
    engine_s: float = 0.0
    environment_s: float = 0.0
    blocked_s: float = 0.0
    floor: int | None = None
    lost: Callable[[int], bool] = lambda version: False
    streamed: Streamed | None = None
    origin: dict[str, Any] = field(default_factory=dict)

    def as_info(self) -> dict[str, Any]:
        return {
            "resubmissions": self.resubmissions,
            "engine_failures": self.engine_failures,
            "retractions": self.retractions,
            "engine_s": round(self.engine_s, 4),
            "environment_s": round(self.environment_s, 4),
            **({"withdrawn": self.withdrawn} if self.withdrawn else {}),
            **({"blocked_s": round(self.blocked_s, 4)} if self.blocked_s else {}),
            **self.origin,
        }


async def run_episode(
    client: Sampler,
    chat: Chat,
    environment: Environment,
    trajectory: Trajectory,
    limits: EpisodeLimits,
    progress: EpisodeProgress | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> Trajectory:
    """Play `environment` to its end with the policy behind `client`; returns `trajectory`, finished.

    trajectory: empty, with its ids and sampling parameters, or one that was cut and goes on: the environment is then
    given the recorded turns first. progress: filled while the episode runs. on_tokens: called with the number of new
    tokens whenever some arrive. `trajectory.info` gets: `ending` (done, max_turns,
    max_tokens, max_new_tokens, environment_truncated, or the kind of failure), `reward` (the environment's own
    info), `reason` and `failure` (kind and message, when it failed), and what `EpisodeProgress` counts.

    Failures of the environment or the engines end the trajectory with a status; they are not raised. Errors of this
    program (a template that cannot encode, a bug), cancellation, and ReplayDiverged, are raised after the environment
    was closed.
    """
    progress = progress or EpisodeProgress()
    episode = _Episode(
        client, chat, environment, trajectory, limits, progress, on_tokens or (lambda count: None)
    )
    try:
        ending = await _within_life(episode, limits.trajectory_deadline_s)
    except EpisodeFailure as failure:
        ending = _failed(trajectory, failure)
    finally:
        closing = environment_call(environment, "close", trajectory)
        await environment_calls.close(closing, environment, limits.turn_deadline_s)
    return _finished(trajectory, ending, progress)


def fail(trajectory: Trajectory, failure: EpisodeFailure, progress: EpisodeProgress) -> Trajectory:
    """End an episode that could not begin; returns `trajectory`, finished as by `run_episode`."""
    return _finished(trajectory, _failed(trajectory, failure), progress)


def environment_call(owner: object, method: str, trajectory: Trajectory) -> Call:
    """The call of `method`, of an environment or of what makes one, for this trajectory."""
    return Call(owner, method, trajectory.trajectory_id, trajectory.group_id, trajectory.prompt_id)


@dataclass(frozen=True, slots=True)
class _Ending:
    status: Status
    kind: str
    reward: float | None
    info: dict[str, Any]


def _failed(trajectory: Trajectory, failure: EpisodeFailure) -> _Ending:
    logger.warning("trajectory %s: %s: %s", trajectory.trajectory_id, failure.kind, failure)
    return _Ending(failure.status, failure.kind, None, {"reason": failure.kind, "failure": str(failure)})


def _finished(trajectory: Trajectory, ending: _Ending, progress: EpisodeProgress) -> Trajectory:
    info = {"ending": ending.kind, **ending.info, **progress.as_info()}
    trajectory.finish(ending.status, ending.reward, info)
    return trajectory


async def _within_life(episode: _Episode, deadline_s: float) -> _Ending:
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            return await episode.play()
    except TimeoutError:
        if not deadline.expired():
            raise  # a defect: every wait in there names its own deadline
        raise EpisodeFailure(
            Status.ABORTED,
            "trajectory_deadline",
            f"not finished after {deadline_s:g} s (rollout.trajectory_deadline_s) while waiting for "
            f"{episode.progress.waiting_for}",
        ) from None


class _Episode:
    def __init__(
        self,
        client: Sampler,
        chat: Chat,
        environment: Environment,
        trajectory: Trajectory,
        limits: EpisodeLimits,
        progress: EpisodeProgress,
        on_tokens: Callable[[int], None],
    ) -> None:
        self.client = client
        self.chat = chat
        self.environment = environment
        self.trajectory = trajectory
        self.limits = limits
        self.progress = progress
        self.on_tokens = on_tokens
        self.sent = np.zeros(0, np.int32)

    # ------------------------------------------------------------------ the conversation

    async def play(self) -> _Ending:
        start = environment_answers.start(await self._ask_environment("reset", self.environment.reset))
        prompt = self.chat.initial_ids(start.messages, start.tools)
        if len(self.trajectory):
            ending = await self._replay(prompt)
            if ending is not None:
                return ending
        else:
            self._append_prompt(prompt)
        while True:
            await self._sample_turn()
            answer = await self._answer(len(self.trajectory.turns), self.trajectory.turns[-1])
            if isinstance(answer, _Ending):
                return answer
            self.trajectory.append_context(answer)

    async def _replay(self, prompt: list[int]) -> _Ending | None:
        """Bring the environment to where the trajectory ends; the ending, if the last recorded turn was the last."""
        ids, at = self.trajectory.token_ids.tolist(), 0
        expected = prompt
        for number, turn in enumerate(self.trajectory.turns, 1):
            if ids[at : turn.start] != expected:
                raise ReplayDiverged(f"the context before turn {number} is not what was recorded")
            answer = await self._answer(number, turn)
            if isinstance(answer, _Ending):
                if turn.end != len(ids):
                    raise ReplayDiverged(f"turn {number} ended the episode ({answer.kind}), but more was recorded")
                return answer
            expected, at = answer, turn.end
        context_ends = self.trajectory.open_turn if self.trajectory.open_turn is not None else len(ids)
        if ids[at:context_ends] not in ([], expected) or (context_ends < len(ids) and context_ends == at):
            raise ReplayDiverged("the last context is not what was recorded")
        if context_ends == at:
            self.trajectory.append_context(expected)
        return None

    async def _answer(self, number: int, turn: Turn) -> _Ending | list[int]:
        """What follows the `number`-th turn (from 1): the episode's end, or the ids of the observation."""
        if turn.finish_reason == "length":
            full = turn.end >= self.limits.max_tokens
            return await self._reward(Status.TRUNCATED, "max_tokens" if full else "max_new_tokens")
        said = self.trajectory.token_ids[turn.start : turn.end].tolist()
        call = partial(self.environment.step, self.chat.parse(said))
        step = environment_answers.step(await self._ask_environment("step", call))
        if step.done:
            if step.truncated:
                return await self._reward(Status.TRUNCATED, "environment_truncated")
            return await self._reward(Status.OK, "done")
        if number >= self.limits.max_turns:
            return await self._reward(Status.TRUNCATED, "max_turns")
        observation = self._observation_ids(step.messages, said)
        if turn.end + len(observation) >= self.limits.max_tokens:
            return await self._reward(Status.TRUNCATED, "max_tokens")
        return observation

    def _append_prompt(self, ids: list[int]) -> None:
        if len(ids) >= self.limits.max_tokens:
            raise EpisodeFailure(
                Status.ENVIRONMENT_ERROR,
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens, rollout.max_tokens={self.limits.max_tokens} leaves no room for an "
                "answer; raise it or shorten the task",
            )
        self.trajectory.append_context(ids)

    def _observation_ids(self, messages: list[Message], said: list[int]) -> list[int]:
        environment_answers.check_observation(messages)
        return self.chat.observation_ids(messages, closed=said[-1:] == [self.chat.turn_end_id])

    async def _reward(self, status: Status, kind: str) -> _Ending:
        answer = await self._ask_environment("reward", self.environment.reward)
        reward, info = environment_answers.reward(answer)
        return _Ending(status, kind, reward, {"reward": info})

    async def _ask_environment(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make one call of the environment; whatever goes wrong in there is an `environment_error`."""
        self.progress.waiting_for = f"environment.{what}"
        started = time.monotonic()
        try:
            named = environment_call(self.environment, what, self.trajectory)
            return await environment_calls.ask(named, call, self.limits.turn_deadline_s, self._blocked)
        finally:
            self.progress.environment_s += time.monotonic() - started

    def _blocked(self, seconds: float) -> None:
        self.progress.blocked_s += seconds

    # ------------------------------------------------------------------ one turn of the policy

    async def _sample_turn(self) -> str:
        """Sample one turn and return its finish reason ("stop" or "length")."""
        self.progress.waiting_for = "engine"
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.turn_deadline_s) as deadline:
                return await self._request_until_complete()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise EpisodeFailure(
                Status.ENGINE_ERROR,
                "turn_deadline",
                f"turn {len(self.trajectory.turns) + 1} not complete after {self.limits.turn_deadline_s:g} s "
                "(rollout.turn_deadline_s)",
            ) from error
        finally:
            self.progress.engine_s += time.monotonic() - started

    async def _request_until_complete(self) -> str:
        failures = 0
        while True:
            budget = self.trajectory.remaining_new_tokens(self.limits.max_tokens)
            if ended := "stop" if self._holds_its_end() else "length" if budget == 0 else "":
                self.trajectory.append_action([], [], (), finish_reason=ended)
                return ended
            before = len(self.trajectory)
            try:
                reason = await self._request(budget)
            except EngineError as error:
                failures += 1
                self._give_up_if(failures, error)
                await asyncio.sleep(failures * _RETRY_PAUSE_S)
                continue
            if reason is not None:
                return reason
            self.progress.resubmissions += 1
            if len(self.trajectory) == before:  # do not spin on an engine that aborts everything
                await asyncio.sleep(_RETRY_PAUSE_S)

    def _holds_its_end(self) -> bool:
        """Whether the turn was recorded up to its stop token, early, and cut before its answer was complete: nothing
        may be sampled after it."""
        start, ids = self.trajectory.open_turn, self.trajectory.token_ids
        return start is not None and start < len(ids) and int(ids[-1]) in self.chat.stop_token_ids

    def _give_up_if(self, failures: int, error: EngineError) -> None:
        """Raises when repeating is pointless: the budget is used up, or the engine refuses the request itself."""
        refused = error.status is not None and 400 <= error.status < 500 and error.status not in _TRY_AGAIN
        if refused or failures > self.limits.max_retries:
            kind = "engine_timeout" if isinstance(error, EngineTimeout) else "engine_failure"
            message = f"{failures} failed requests: {error}"
            raise EpisodeFailure(
                Status.ENGINE_ERROR, "engine_refused" if refused else kind, message
            ) from error
        self.progress.engine_failures += 1
        logger.warning("trajectory %s: request repeated: %s", self.trajectory.trajectory_id, error)

    async def _request(self, budget: int) -> str | None:
        """Send everything so far and append what comes back; None when the response was aborted part way.

        Tokens streamed by a request whose connection then broke are kept as far as their version is certain; the next
        request goes on after them. Those of a request that failed otherwise are withdrawn.
        """
        arrived = 0
        self.progress.streamed = streamed = self._streamed()

        def on_chunk(chunk: Chunk) -> None:
            nonlocal arrived
            arrived += len(chunk.output_ids)
            streamed.add(chunk)
            self._count(len(chunk.output_ids))

        self.progress.requests_sent += 1
        self.progress.request_sent_at = time.time()
        try:
            generation = await self.client.generate(
                self._checked_ids(),
                turn_options(self.trajectory.sampling, budget, self.chat.stop_token_ids),
                on_chunk=on_chunk,
                return_routed_experts=self.limits.routed_experts,
                min_version=(self._last_standing() or 0) if self.limits.mixed_versions else 0,
            )
            self._count(len(generation.output_ids) - arrived)
            self.progress.retractions += generation.num_retractions
            reason = None if generation.finish_reason == "abort" else generation.finish_reason
            self._append(generation, reason, streamed)
            return reason
        except (EngineUnreachable, EngineTimeout):
            streamed.settle()
            raise
        except EngineError:
            self.progress.withdrawn += streamed.withdraw()
            raise
        finally:
            self.progress.requests_returned += 1
            self.progress.streamed = None

    def _streamed(self) -> Streamed:
        """For the answer to come. Routed experts, and flags of kept KV, only come with the finished answer."""
        known = [version for version in (self.progress.floor, self._last_standing()) if version is not None]
        certain = known and self.progress.floor is not None
        early = certain and not (self.limits.routed_experts or self.limits.stale_kv)
        return Streamed(self.trajectory, max(known) if early else None)

    def _last_standing(self) -> int | None:
        """Version of the last token, None where there is none or a resume of the trainer has left it behind."""
        last = self.trajectory.last_version
        return None if last is None or self.progress.lost(last) else last

    def _checked_ids(self) -> list[int]:
        ids = self.trajectory.token_ids
        if not np.array_equal(ids[: len(self.sent)], self.sent):
            raise TrajectoryError(
                f"trajectory {self.trajectory.trajectory_id!r}: its first {len(self.sent)} ids are not those that were "
                "sent in the request before; ids may only be appended"
            )
        self.sent = ids.copy()
        return self.sent.tolist()

    def _count(self, tokens: int) -> None:
        if tokens > 0:
            self.progress.tokens += tokens
            self.on_tokens(tokens)

    def _append(self, generation: Generation, reason: str | None, streamed: Streamed) -> None:
        """One append for all that is not recorded yet; what breaks the invariants is the engine's failure."""
        try:
            ids, logprobs, spans = streamed.rest(generation, self._version_spans(generation.spans))
            self.trajectory.append_action(ids, logprobs, spans, reason, generation.routed_experts)
        except TrajectoryError as error:
            raise EngineError(f"the answer does not fit its trajectory: {error}") from error

    def _version_spans(self, spans: list[Span]) -> list[VersionSpan]:
        """The engine's spans; where KV survives updates, flagged with the oldest version whose KV may be left."""
        oldest = self.trajectory.min_version
        if oldest is None and spans:
            oldest = spans[0].version
        kept = oldest if self.limits.stale_kv else None
        placed = []
        for span in spans:
            kv_version = kept if span.kv_version is None else span.kv_version
            placed.append(VersionSpan(span.version, span.start, span.end, kv_version))
        return placed
