"""Scripted agents at the desk: one that works by the policy, and one that skips checks.

They see what a model would see (the opening words, answers, tool results), never the task. The careful one shows that
every task can be solved; the sloppy one writes demonstrations of mixed quality, which leave reinforcement learning
something to find.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from megatron_async.rollout.environments.base import Message, ToolCall
from megatron_async.rollout.environments.desk_policy import OUTCOMES, DeskPolicy, Intent, Verdict, judge
from megatron_async.rollout.environments.desk_world import OPENINGS

_ORDER_ID = re.compile(r"\b[A-Z]\d\b")
Script = Generator[Message, str, None]


@dataclass(frozen=True, slots=True)
class Habits:
    """An agent's mistakes in one episode.

    `skip_user`: never asks for the name, so it cannot tell whose order it is. `skip_order`: acts without the order's
    record (a question about the status makes it look all the same). `ignore_status`: has the record, but takes every
    order for a pending one when it acts.
    """

    skip_user: bool = False
    skip_order: bool = False
    ignore_status: bool = False


CAREFUL = Habits()


@dataclass(frozen=True, slots=True)
class Sloppiness:
    """How often a sloppy agent makes each mistake of `Habits`, independently of the others.

    ValueError for a probability outside [0, 1].
    """

    skip_user: float = 0.5
    skip_order: float = 0.2
    ignore_status: float = 0.5

    def __post_init__(self) -> None:
        for mistake, probability in dataclasses.asdict(self).items():
            if not 0.0 <= probability <= 1.0:
                raise ValueError(f"sloppiness {mistake} is {probability}: a probability lies in [0, 1]")

    def draw(self, rng: random.Random) -> Habits:
        """Habits for one episode."""
        return Habits(*(rng.random() < probability for probability in dataclasses.astuple(self)))


SLOPPY = Sloppiness()
NOT_SLOPPY = Sloppiness(0.0, 0.0, 0.0)


def script(opening: str, policy: DeskPolicy, habits: Habits = CAREFUL) -> Script:
    """The agent as a generator: yields assistant messages, is sent the text of each observation.

    A skipped record is filled by hope: the order is the user's own, pending, and its amount goes unsaid.
    """
    intent = _intent(opening)
    found = _ORDER_ID.search(opening)
    order_id = found.group() if found else _last_word((yield _say("which order?")))
    if not habits.skip_user:
        name = _last_word((yield _say("your name?")))
        if not json.loads((yield _call("verify_owner", name=name, order_id=order_id)))["owner"]:
            yield _say(f"cannot, not {judge(policy, intent, '', owned=False).outcome} {order_id}")
            return
    order: dict[str, Any] = {"status": "pending", "amount": ""}
    if not habits.skip_order or intent == "status":
        order = json.loads((yield _call("get_order", order_id=order_id)))
    acts_on = "pending" if habits.ignore_status and intent != "status" else order["status"]
    verdict = judge(policy, intent, acts_on, owned=True)
    if verdict.action != "none" and policy.confirm_changes:
        sure = (yield _say("are you sure?")) == "yes"
        verdict = judge(policy, intent, acts_on, owned=True, sure=sure)
    if verdict.action == "resize_order":
        size = _last_word((yield _say("which size?")))
        yield _call("resize_order", order_id=order_id, size=size)
    elif verdict.action != "none":
        yield _call(verdict.action, order_id=order_id)
    yield _say(_closing(intent, verdict, order["amount"]))


def _intent(opening: str) -> Intent:
    if "cancel" in opening:
        return "cancel"
    return "resize" if "size" in opening else "status"


def _closing(intent: Intent, verdict: Verdict, amount: int | str) -> str:
    if verdict.action != "none":
        text = f"done, {verdict.outcome} {amount}"
    elif intent == "status":
        text = f"status is {verdict.outcome} {amount}"
    else:
        text = f"cannot, {verdict.outcome} {amount}"
    return text.strip()


def _last_word(answer: str) -> str:
    return answer.split()[-1]


def _say(text: str) -> Message:
    return Message("assistant", text)


def _call(tool: str, /, **arguments: str) -> Message:
    return Message("assistant", "", (ToolCall(tool, dict(arguments)),))


CHANGES = (
    Verdict("cancel_order", "refund"),
    Verdict("return_order", "returned"),
    Verdict("resize_order", "changed"),
)


def speech() -> list[str]:
    """Every kind of line that user and agent say at the desk, with an example of each entity: text for a tokenizer."""
    openings = [line for lines in OPENINGS.values() for line in lines]
    answers = ["i am ann", "order A0", "size M", "size S", "size L", "yes", "no", "sorry?"]
    questions = ["which order?", "your name?", "which size?", "are you sure?"]
    closings = [
        _closing(intent, verdict, amount)
        for verdict in (*(Verdict("none", outcome) for outcome in OUTCOMES), *CHANGES)
        for intent in OPENINGS
        for amount in ("", 10)
    ]
    closings += ["cannot, not yours A0"] * len(OPENINGS)
    return [*openings, *(f"{line} A0" for line in openings), *answers, *questions, *closings]
