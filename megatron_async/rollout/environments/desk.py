"""The service desk: an offline, deterministic, tau-bench-shaped domain for agents with tools and a user.

A system prompt states a policy, five tools read and change a small database without enforcing it, and a scripted user
reveals facts when asked. An episode succeeds (reward 1, else 0) when all three hold:

    database    the final database equals the gold one, compared by digest;
    said        the reply that ended the conversation names the right outcome and the right fact (the order's amount, or
                its id where the order is somebody else's), and no other;
    ended       the user ended it, content (not the turn limit, a malformed turn, or a user out of patience).

Invariants
- Everything is a function of the task's number and the policy: no clock, no network, no hidden randomness.
- Held-out task numbers are the first `HELDOUT_TASKS`, in the same order for every seed, so success rates of different
  runs are comparable; training numbers come after them, in an order that the run's seed decides.

Tasks from the options of a configuration: `desk_options`.
"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass
from typing import Any

from megatron_async.rollout.environments.base import AssistantTurn, Message, Split, Start, Step, Task
from megatron_async.rollout.environments.desk_policy import OUTCOMES, DeskPolicy, policy_from
from megatron_async.rollout.environments.desk_world import TOOLS, DeskTask, draw_task

HELDOUT_TASKS = 10_000
TRAIN_TASKS = 990_000

_OUTCOME = re.compile(rf"\b(?:{'|'.join(OUTCOMES)})\b")
_FACT = re.compile(r"\b(?:\d+|[A-Z]\d)\b")
_CLOSING = re.compile(r"\bdone\b|\bcannot\b|\bstatus is\b")


class ScriptedUser:
    """The person at the desk: a small state machine that tells what is asked for and ends the conversation.

    A reply that contains "done", "cannot" or "status is" closes the case and the user leaves content. A reply the user
    cannot make sense of is answered by "sorry?"; at the second one the user leaves.
    """

    PATIENCE = 2

    def __init__(self, task: DeskTask) -> None:
        self._task = task
        self._confused = 0
        self.left: str | None = None
        """Why the user ended the conversation: "content", "confused", or None while it goes on."""

    def answer(self, said: str) -> str:
        """The user's answer to a reply; empty when the user has left."""
        text = said.lower()
        if _CLOSING.search(text):
            self.left = "content"
            return ""
        facts = self._facts(text)
        if facts:
            return ", ".join(facts)
        self._confused += 1
        if self._confused >= self.PATIENCE:
            self.left = "confused"
            return ""
        return "sorry?"

    def _facts(self, text: str) -> list[str]:
        task = self._task
        asked = {
            "name": f"i am {task.name}",
            "order": f"order {task.order_id}",
            "size": f"size {task.size}",
            "sure": "yes" if task.sure else "no",
        }
        return [fact for word, fact in asked.items() if re.search(rf"\b{word}\b", text)]


class DeskEnvironment:
    """One episode at the desk. A turn is tool calls or speech: the user does not hear text beside tool calls."""

    def __init__(self, task: DeskTask, stated: DeskPolicy | None = None) -> None:
        """stated: the policy that the system prompt tells, if not the one that judges."""
        self.task = task
        self._stated = stated or task.policy
        self._database = task.database.copy()
        self._user = ScriptedUser(task)
        self._last_reply = ""
        self._malformed: str | None = None

    async def reset(self) -> Start:
        """The policy text and the user's opening words."""
        return Start([Message("system", self._stated.text()), Message("user", self.task.opening)], TOOLS)

    async def step(self, turn: AssistantTurn) -> Step:
        """Run the tool calls, or let the user answer. A malformed turn ends the episode without success."""
        if turn.parse_error is not None:
            self._malformed = turn.parse_error
            return Step([], done=True)
        if turn.tool_calls:
            answers = [json.dumps(self._database.call(call)) for call in turn.tool_calls]
            return Step([Message("tool", answer) for answer in answers], done=False)
        self._last_reply = turn.content
        answer = self._user.answer(turn.content)
        if self._user.left is not None:
            return Step([], done=True)
        return Step([Message("user", answer)], done=False)

    async def reward(self) -> tuple[float, dict[str, Any]]:
        """1.0 for success, else 0.0; info holds the three parts and how the conversation ended."""
        info: dict[str, Any] = {
            "database": self._database.digest() == self.task.gold_digest,
            "said": self._said(),
            "ended": self._user.left == "content",
            "termination": self._termination(),
            "intent": self.task.intent,
        }
        if self._malformed is not None:
            info["parse_error"] = self._malformed
        return float(info["database"] and info["said"] and info["ended"]), info

    async def close(self) -> None:
        """Nothing is held."""

    def _said(self) -> bool:
        outcomes = set(_OUTCOME.findall(self._last_reply.lower()))
        facts = set(_FACT.findall(self._last_reply))
        # The id of the order in question may always stand beside the fact.
        return outcomes == {self.task.outcome} and self.task.fact in facts <= {
            self.task.fact,
            self.task.order_id,
        }

    def _termination(self) -> str:
        if self._malformed is not None:
            return "malformed_turn"
        return {"content": "user_content", "confused": "user_confused", None: "cut"}[self._user.left]


@dataclass(frozen=True)
class DeskTasks:
    """Desk tasks of one split under one policy. pool: how many training tasks there are; few come back often."""

    split: Split
    policy: DeskPolicy = DeskPolicy()
    seed: int = 0
    pool: int = TRAIN_TASKS

    @property
    def size(self) -> int:
        """Number of distinct tasks in the split."""
        return HELDOUT_TASKS if self.split == "heldout" else self.pool

    def task(self, index: int) -> Task:
        """Task `index` of the split; IndexError past its end."""
        if not 0 <= index < self.size:
            raise IndexError(f"desk task {index}: the {self.split} split has tasks 0 to {self.size - 1}")
        number = index if self.split == "heldout" else HELDOUT_TASKS + self._shuffled(index)
        return Task(f"desk-{number}", {"number": number, "policy": self.policy.to_json()})

    def replayable(self, task: Task) -> bool:
        """Its answers are a function of the task and the turns."""
        return True

    def environment(self, task: Task) -> DeskEnvironment:
        """A fresh episode of `task`."""
        return DeskEnvironment(draw_task(task.data["number"], policy_from(task.data["policy"])))

    def _shuffled(self, index: int) -> int:
        # i -> (a i + b) mod N with gcd(a, N) = 1 is a permutation: every task once, without a table of them.
        rng = random.Random(f"desk order {self.seed}")
        stride = rng.randrange(TRAIN_TASKS // 3, TRAIN_TASKS)
        while math.gcd(stride, TRAIN_TASKS) != 1:
            stride += 1
        return (stride * index + rng.randrange(TRAIN_TASKS)) % TRAIN_TASKS
