"""The service desk's world: a small database, the tools that read and change it, and tasks drawn from seeds.

Invariants
- The tools do not enforce the policy: they do what they are told to any order of anybody. Knowing better is the
  agent's job.
- A tool answers every call with JSON; a wrong name, argument or id is an `error` in the answer, never an exception.
- `draw_task` is a pure function of the task's number and the policy.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_async.rollout.environments.base import ToolCall
from megatron_async.rollout.environments.desk_policy import DeskPolicy, Intent, judge

NAMES = ("ann", "bob", "cat", "dan", "eve", "fay", "gus", "hal", "ivy", "joe", "kim", "lee")
USER_IDS = ("u1", "u2", "u3", "u4")
ORDER_IDS = tuple(f"{letter}{digit}" for letter in "ABCD" for digit in range(6))
AMOUNTS = tuple(range(10, 58, 2))
SIZES = ("S", "M", "L")
STATUSES = ("pending", "shipped", "delivered")
OPENINGS: dict[Intent, tuple[str, ...]] = {
    "cancel": ("cancel my order", "i want to cancel", "please cancel an order"),
    "resize": ("resize my order", "i need another size", "please swap the size"),
    "status": ("where is my order", "order status please", "what about my order"),
}
# Cancelling and resizing are twice as frequent as asking: they are where the policy can be broken.
INTENTS: tuple[Intent, ...] = ("cancel", "cancel", "resize", "resize", "status")
OWN_ORDER_SHARE = 0.75
NAMES_ORDER_AT_ONCE_SHARE = 0.3
SURE_SHARE = 0.6


class DeskDatabase:
    """Users and orders. Every change goes through `call`."""

    def __init__(self, users: dict[str, dict[str, Any]], orders: dict[str, dict[str, Any]]) -> None:
        """`users`: id -> {name}; `orders`: id -> {user_id, status, size, amount}. Both are copied."""
        self.users = {key: dict(value) for key, value in users.items()}
        self.orders = {key: dict(value) for key, value in orders.items()}
        self._tools: dict[str, Callable[..., dict[str, Any]]] = {
            "verify_owner": self._verify_owner,
            "get_order": self._get_order,
            "cancel_order": self._cancel_order,
            "return_order": self._return_order,
            "resize_order": self._resize_order,
        }

    def copy(self) -> DeskDatabase:
        """An independent copy."""
        return DeskDatabase(self.users, self.orders)

    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the whole state: equal digests mean equal databases."""
        state = json.dumps({"users": self.users, "orders": self.orders}, sort_keys=True)
        return hashlib.sha256(state.encode()).hexdigest()

    def call(self, call: ToolCall) -> dict[str, Any]:
        """The tool's answer."""
        tool = self._tools.get(call.name)
        if tool is None:
            return {"error": "no such tool"}
        expected = TOOL_ARGUMENTS[call.name]
        if set(call.arguments) != set(expected) or not all(
            isinstance(v, str) for v in call.arguments.values()
        ):
            return {"error": "bad arguments"}
        if "order_id" in expected and call.arguments["order_id"] not in self.orders:
            return {"error": "no such order"}
        return tool(**call.arguments)

    def _verify_owner(self, name: str, order_id: str) -> dict[str, Any]:
        known = {user["name"]: user_id for user_id, user in self.users.items()}
        if name not in known:
            return {"error": "no such user"}
        return {"owner": known[name] == self.orders[order_id]["user_id"]}

    def _get_order(self, order_id: str) -> dict[str, Any]:
        return dict(self.orders[order_id])

    def _cancel_order(self, order_id: str) -> dict[str, Any]:
        self.orders[order_id]["status"] = "cancelled"
        return {"refund": self.orders[order_id]["amount"]}

    def _return_order(self, order_id: str) -> dict[str, Any]:
        self.orders[order_id]["status"] = "returned"
        return {"ok": True}

    def _resize_order(self, order_id: str, size: str) -> dict[str, Any]:
        if size not in SIZES:
            return {"error": "no such size"}
        self.orders[order_id]["size"] = size
        return {"ok": True}


def _schema(name: str, description: str, arguments: dict[str, str]) -> dict[str, Any]:
    properties: dict[str, Any] = {
        key: {"type": "string", "description": text} for key, text in arguments.items()
    }
    if "size" in properties:
        properties["size"]["enum"] = list(SIZES)
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


_ORDER = {"order_id": "id of the order"}
TOOLS: list[dict[str, Any]] = [
    _schema("verify_owner", "Tell whether an order is this user's.", {"name": "first name", **_ORDER}),
    _schema("get_order", "Read an order: owner, status, size, amount.", _ORDER),
    _schema("cancel_order", "Cancel an order and refund it.", _ORDER),
    _schema("return_order", "Take an order back.", _ORDER),
    _schema("resize_order", "Change the size of an order.", {**_ORDER, "size": "new size"}),
]
TOOL_ARGUMENTS: dict[str, tuple[str, ...]] = {
    tool["function"]["name"]: tuple(tool["function"]["parameters"]["required"]) for tool in TOOLS
}


@dataclass(frozen=True, slots=True)
class DeskTask:
    """One case: who wants what, the database, and what must be true at the end.

    `sure` is the user's answer when asked to confirm a change. `gold_digest` is the digest of the right final
    database. The last reply must say `outcome` and `fact`: the amount of the order, or its id where it is not the
    user's and nothing else about it may be told.
    """

    number: int
    policy: DeskPolicy
    database: DeskDatabase
    name: str
    intent: Intent
    order_id: str
    size: str
    opening: str
    sure: bool
    gold_digest: str
    outcome: str
    fact: str


def draw_task(number: int, policy: DeskPolicy) -> DeskTask:
    """The task with this number. The same number under another policy is the same case, judged otherwise."""
    rng = random.Random(f"desk task {number}")
    names, user_ids, order_ids = rng.sample(NAMES, 2), rng.sample(USER_IDS, 2), rng.sample(ORDER_IDS, 3)
    users = {user_id: {"name": name} for user_id, name in zip(user_ids, names, strict=True)}
    orders = {order_id: _draw_order(rng, user_ids[i % 2]) for i, order_id in enumerate(order_ids)}
    intent = rng.choice(INTENTS)
    owned = rng.random() < OWN_ORDER_SHARE
    order_id = order_ids[0] if owned else order_ids[1]
    order = orders[order_id]
    opening = rng.choice(OPENINGS[intent])
    if rng.random() < NAMES_ORDER_AT_ONCE_SHARE:
        opening += f" {order_id}"
    size = rng.choice([size for size in SIZES if size != order["size"]])
    sure = rng.random() < SURE_SHARE or not policy.confirm_changes
    # The dictionaries are shuffled so that the position of an order says nothing about whose it is.
    database = DeskDatabase(users, {key: orders[key] for key in rng.sample(order_ids, 3)})
    verdict = judge(policy, intent, order["status"], owned=owned, sure=sure)
    gold = database.copy()
    if verdict.action != "none":
        arguments = {"order_id": order_id, "size": size}
        gold.call(ToolCall(verdict.action, {key: arguments[key] for key in TOOL_ARGUMENTS[verdict.action]}))
    return DeskTask(
        number, policy, database, names[0], intent, order_id, size, opening, sure,
        gold.digest(), verdict.outcome, str(order["amount"]) if owned else order_id,
    )  # fmt: skip


def _draw_order(rng: random.Random, user_id: str) -> dict[str, Any]:
    return {
        "user_id": user_id,
        "status": rng.choice(STATUSES),
        "size": rng.choice(SIZES),
        "amount": rng.choice(AMOUNTS),
    }
