"""What cannot be simulated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from megatron_async.errors import UserError


class ScenarioError(UserError, ValueError):
    """Numbers that describe no loop, or a loop that cannot go on; the message says which and why."""


def number_problems(model: Any, may_be_infinite: Iterable[str] = ()) -> list[str]:
    """Which fields of a dataclass hold a number that is negative, or none at all."""
    problems = []
    for field in fields(model):
        value = getattr(model, field.name)
        if isinstance(value, int | float) and not (value >= 0 and (value < math.inf or field.name in may_be_infinite)):
            problems.append(f"{type(model).__name__}.{field.name} is {value:g}, not a number of at least 0")
    return problems
