"""How deeply JSON that a model wrote may be nested.

What copies, checks or writes a value recurses into it, and a few hundred brackets, which a model that repeats itself
writes in one turn, end in a RecursionError of code that is not to blame.
"""

from __future__ import annotations

from typing import Any

DEEPEST = 64
"""Levels of lists and objects in the arguments of a tool call; no tool that we know of takes more than five."""


def shallow(value: Any) -> bool:
    """Whether a JSON value has at most `DEEPEST` levels."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [part for outer in level for part in _parts(outer)]
        if not level:
            return True
    return False


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
