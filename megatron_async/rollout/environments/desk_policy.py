"""The service desk's policy, as data: a few rules, the text that states them, and what they demand of a case.

Invariants
- The policy text in the system prompt, the gold outcome of a task and the scripted agents all read the same
  `DeskPolicy`: a rule cannot be stated and not rewarded, or rewarded and not stated.
- A policy is JSON (`to_json`, `policy_from`), so a switch of policy during a run is configuration, not code.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Intent = Literal["cancel", "resize", "status"]
Action = Literal["none", "cancel_order", "return_order", "resize_order"]

ROLE_CLAUSE = "You work at the order desk of a shop."
COMMON_CLAUSES = (
    "Verify the name of the user and look at the order before you act.",
    "If the order is somebody else's, refuse and tell nothing but its id.",
    "Only pending orders may be resized.",
    "A delivered order is returned instead of cancelled; a shipped order is left alone.",
    "Else say the outcome and the amount of the order in your last reply.",
)
CANCEL_CLAUSES = {
    "cancel": "A pending order may be cancelled.",
    "return": "No order is ever cancelled: a pending order is returned too.",
}
CONFIRM_CLAUSES = {
    False: "Act without asking for confirmation.",
    True: "Ask whether the user is sure before you change an order; without a yes keep it.",
}


@dataclass(frozen=True, slots=True)
class DeskPolicy:
    """The rules that vary.

    `pending_cancellation`: what a wish to cancel a pending order leads to, the tool `cancel_order` or `return_order`.
    `confirm_changes`: the user must be asked before the database changes; some users then change their mind, so an
    agent that does not ask leaves the wrong database behind.
    """

    pending_cancellation: Literal["cancel", "return"] = "cancel"
    confirm_changes: bool = False

    def __post_init__(self) -> None:
        if self.pending_cancellation not in CANCEL_CLAUSES:
            raise ValueError(
                f"desk policy: pending_cancellation is {self.pending_cancellation!r}; use one of {list(CANCEL_CLAUSES)}"
            )

    def clauses(self) -> tuple[str, ...]:
        """The sentences of the policy text, in order."""
        varying = (CANCEL_CLAUSES[self.pending_cancellation], CONFIRM_CLAUSES[self.confirm_changes])
        return (ROLE_CLAUSE, *COMMON_CLAUSES, *varying)

    def text(self) -> str:
        """The system prompt."""
        return " ".join(self.clauses())

    def to_json(self) -> dict[str, Any]:
        """The policy as JSON; `policy_from` reads it back."""
        return dataclasses.asdict(self)


POLICIES: dict[str, DeskPolicy] = {
    "cancel_allowed": DeskPolicy(),
    "return_only": DeskPolicy(pending_cancellation="return"),
    "ask_first": DeskPolicy(confirm_changes=True),
}


def policy_from(value: str | Mapping[str, Any]) -> DeskPolicy:
    """A policy from its name in `POLICIES` or from its fields. ValueError lists the choices."""
    if isinstance(value, str):
        if value not in POLICIES:
            near = difflib.get_close_matches(value, POLICIES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown desk policy {value!r}{hint} Known: {', '.join(POLICIES)}")
        return POLICIES[value]
    known = {field.name for field in dataclasses.fields(DeskPolicy)}
    unknown = sorted(set(value) - known)
    if unknown:
        raise ValueError(
            f"unknown fields of a desk policy: {', '.join(unknown)}. Known: {', '.join(sorted(known))}"
        )
    return DeskPolicy(**value)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy demands of a case: the action on the order, and the outcome word the user must hear."""

    action: Action
    outcome: str


def judge(policy: DeskPolicy, intent: Intent, status: str, *, owned: bool, sure: bool = True) -> Verdict:
    """The right action and outcome word for a wish about an order in `status`.

    `owned`: the order belongs to the verified user. `sure`: the user's answer when asked to confirm; it matters only
    under `confirm_changes`.
    """
    if not owned:
        return Verdict("none", "yours")
    if intent == "status":
        return Verdict("none", status)
    verdict = _wish(policy, intent, status)
    if verdict.action != "none" and policy.confirm_changes and not sure:
        return Verdict("none", "kept")
    return verdict


def _wish(policy: DeskPolicy, intent: Intent, status: str) -> Verdict:
    if intent == "resize":
        return Verdict("resize_order", "changed") if status == "pending" else Verdict("none", status)
    if status == "delivered" or (status == "pending" and policy.pending_cancellation == "return"):
        return Verdict("return_order", "returned")
    if status == "pending":
        return Verdict("cancel_order", "refund")
    return Verdict("none", status)


OUTCOMES = ("yours", "pending", "shipped", "delivered", "kept", "changed", "returned", "refund")
