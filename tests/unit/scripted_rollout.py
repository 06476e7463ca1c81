"""Stand-ins for the network and the world: an engine that answers by rule, an environment that follows a script.

The engine's next token is a function of all ids before it, so a response that was cut and resubmitted must come out
as the one that was never cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_async.rollout.environments.base import AssistantTurn, Message, Start, Step, Task
from sglang_bridge import Chunk, Generation, SamplingOptions, Span

END = 7
"""Token that ends a turn."""


def next_token(ids: Sequence[int], turn_length: int) -> int:
    """Token after `ids`; END once the turn (counted since the last context token < 10) has `turn_length` tokens."""
    since = 0
    while since < len(ids) and ids[-1 - since] >= 10:
        since += 1
    if since >= turn_length - 1:
        return END
    return 10 + (31 * sum(ids[-5:]) + len(ids)) % 50


def logprob_of(token: int) -> float:
    return -0.125 * (token % 8 + 1)  # exact in float32


def continuation(ids: Sequence[int], count: int, turn_length: int) -> list[int]:
    """Up to `count` tokens after `ids`, END included."""
    out: list[int] = []
    while len(out) < count and (not out or out[-1] != END):
        out.append(next_token([*ids, *out], turn_length))
    return out


@dataclass
class RuleSampler:
    """`generate` without a network. `plan` may change the answer of the n-th call (0, 1, ...).

    plan(n) returns None (answer by the rule), an exception to raise, or a tuple (count, reason): stop after `count`
    tokens with that reason. cuts: positions, in tokens of one answer, where the version goes up by one.
    """

    turn_length: int = 4
    version: int = 0
    plan: Callable[[int], Any] = lambda call: None
    cuts: tuple[int, ...] = ()
    delay_s: float = 0.0
    calls: list[tuple[list[int], SamplingOptions]] = field(default_factory=list)

    async def generate(
        self,
        input_ids: list[int],
        sampling: SamplingOptions,
        *,
        rid: str | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        return_routed_experts: bool = False,
        min_version: int = 0,
    ) -> Generation:
        call = len(self.calls)
        self.calls.append((list(input_ids), sampling))
        await asyncio.sleep(self.delay_s)
        planned = self.plan(call)
        if isinstance(planned, Exception):
            raise planned
        count, reason = planned or (sampling.max_new_tokens, None)
        ids = continuation(input_ids, min(count, sampling.max_new_tokens), self.turn_length)
        spans = self._spans(len(ids))
        if on_chunk and ids:
            on_chunk(Chunk(0, ids, [logprob_of(t) for t in ids], str(self.version)))
        ended = reason or ("stop" if ids[-1:] == [END] else "length")
        return Generation(ids, [logprob_of(t) for t in ids], spans, ended)

    def _spans(self, length: int) -> list[Span]:
        edges = [0, *(c for c in self.cuts if c < length), length]
        spans = [Span(self.version + i, a, b) for i, (a, b) in enumerate(zip(edges, edges[1:])) if a < b]
        self.version = spans[-1].version if spans else self.version
        self.cuts = ()
        return spans


class PlainChat:
    """Ids by hand: the prompt is [1, 2, 3], an observation [4, 5] (with END in front when the turn was not closed)."""

    stop_token_ids = (END,)
    turn_end_id = END

    def initial_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        return [1, 2, 3]

    def observation_ids(self, messages: Sequence[Message], *, closed: bool = True) -> list[int]:
        return [4, 5] if closed else [END, 4, 5]

    def parse(self, ids: Sequence[int]) -> AssistantTurn:
        return AssistantTurn(content=" ".join(map(str, ids)))


@dataclass
class ScriptedEnvironment:
    """Lasts `turns` turns. at: what happens at a named call ("reset", "step0", "step1", ..., "reward", "close"):
    an exception to raise, or seconds to wait.
    """

    turns: int = 2
    outcome: float = 1.0
    at: dict[str, Any] = field(default_factory=dict)
    seen: list[AssistantTurn] = field(default_factory=list)
    closed: int = 0

    async def reset(self) -> Start:
        await self._event("reset")
        return Start([Message("user", "hello")])

    async def step(self, turn: AssistantTurn) -> Step:
        await self._event(f"step{len(self.seen)}")
        self.seen.append(turn)
        return Step([Message("user", "go on")], done=len(self.seen) >= self.turns)

    async def reward(self) -> tuple[float, dict[str, Any]]:
        await self._event("reward")
        return self.outcome, {"turns": len(self.seen)}

    async def close(self) -> None:
        self.closed += 1
        await self._event("close")

    async def _event(self, name: str) -> None:
        planned = self.at.get(name, 0)
        if isinstance(planned, Exception):
            raise planned
        await asyncio.sleep(planned)


@dataclass
class ScriptedSource:
    """A task source whose environments are made by `make(task)`; endless unless `size` is given."""

    make: Callable[[Task], Any] = lambda task: ScriptedEnvironment()
    size: int | None = None
    split: str = "train"

    def task(self, index: int) -> Task:
        if self.size is not None and index >= self.size:
            raise IndexError(index)
        return Task(f"task-{index}", {"index": index})

    def environment(self, task: Task) -> Any:
        return self.make(task)
