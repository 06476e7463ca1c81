"""A tokenizer of 1024 entries for a model small enough to learn telecom tickets on a CPU.

What a technician reads and writes on the training tickets is cut into pieces, each of them one token: a line of a
phone's answer, a field of a record, the head of a call, the schema of a tool, a sentence of the prompt. An episode then
takes some five hundred tokens instead of fifteen thousand. Any other text is byte-pair merges, down to bytes.

Invariant: only training tasks are looked at; what stands in the held-out tasks alone is spelt, not known.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast

from megatron_async.rollout.environments.base import AssistantTurn, Message, Start
from megatron_async.rollout.environments.small_tokenizer import HOW_TO_CALL, assemble
from megatron_async.rollout.environments.tau2.environment import Tau2Environment, Tau2Tasks
from megatron_async.rollout.environments.tau2.options import parse
from megatron_async.rollout.environments.tau2.telecom_teacher import technician

VOCABULARY_SIZE = 1024
_FRAMES = ("system\n", "user\n", "user", "assistant\n", "\n\nTools:\n", f"\n{HOW_TO_CALL}", "}}\n", "\n")
_PIECE = re.compile(r'(?: ?\|)?[^\n|]*?(?:\n|, (?=")|\. (?=[A-Z])|(?= ?\|)|$)')


def build(options: Mapping[str, Any], seed: int) -> PreTrainedTokenizerFast:
    """The tokenizer for these environment options; deterministic. Raises ValueError for another domain than telecom,
    or without solo mode: nobody demonstrates there what would have to be written."""
    parsed = parse(options)
    if not parsed.solo or not parsed.domain.startswith("telecom"):
        raise ValueError(
            f"tau2: the small tokenizer is made for telecom in solo mode, not for domain={parsed.domain}, "
            f"solo={parsed.solo}"
        )
    tasks = Tau2Tasks(parsed, "train", seed)
    phrases = dict.fromkeys(_FRAMES)
    for index in range(tasks.size):
        phrases.update(dict.fromkeys(asyncio.run(_spoken(tasks.environment(tasks.task(index))))))
    # Longest first: the order decides nothing but the ids.
    ordered = sorted((phrase for phrase in phrases if len(phrase) > 1 or phrase == "\n"), key=_longest_first)
    return assemble([], ordered, tasks.context.domain.policy.splitlines(), VOCABULARY_SIZE)


def _longest_first(phrase: str) -> tuple[int, str]:
    return -len(phrase), phrase


async def _spoken(environment: Tau2Environment) -> list[str]:
    """The pieces of one episode of the technician."""
    start = await environment.reset()
    pieces = list(_prompt_pieces(start))
    agent = technician(environment.episode.task.ticket)
    turn = next(agent)
    while True:
        pieces += _call_pieces(turn)
        step = await environment.step(AssistantTurn(turn.content, turn.tool_calls))
        if step.done:
            break
        for message in step.messages:
            pieces += cut(message.content)
        turn = agent.send(step.messages[-1].content)
    await environment.close()
    return pieces


def _prompt_pieces(start: Start) -> Iterator[str]:
    for message in start.messages:
        yield from cut(message.content)
    for tool in start.tools:
        yield "\n" + json.dumps(tool, ensure_ascii=False)
        yield _head(tool["function"]["name"])


def _call_pieces(turn: Message) -> Iterator[str]:
    for call in turn.tool_calls:
        yield _head(call.name)
        yield from cut(json.dumps(call.arguments, ensure_ascii=False)[1:-1])


def _head(name: str) -> str:
    return f'\n{{"name": "{name}", "arguments": {{'


def cut(text: str) -> list[str]:
    """Lines, fields of records, cells of a status bar, sentences; joined they are the text again."""
    return [piece for piece in _PIECE.findall(text) if piece]
