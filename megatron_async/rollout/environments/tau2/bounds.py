"""The one tool of the benchmark that computes whatever it is asked to, kept from computing for ever.

`calculate` evaluates an expression in which `**` is allowed. All other tools look up, compare and change records; their
time is bounded by the database and by the length of their arguments, which the limit on a turn's tokens bounds.

Invariant: an expression that the benchmark answers in no time gets the benchmark's answer; the others get an error, as
everything gets whose result is no float. Episodes, and evaluators that replay them, get the same.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_async.rollout.environments.arithmetic import refuse_expression

_TOOL = "calculate"


def bounded(environment: Any) -> Any:
    """The same environment of the benchmark, its calculator bounded."""
    tools = environment.tools
    if tools is not None and tools.has_tool(_TOOL):
        setattr(tools, _TOOL, _bounded(getattr(tools, _TOOL)))
    return environment


def _bounded(calculate: Any) -> Any:
    @functools.wraps(calculate)  # the benchmark reads a tool's kind from its attributes, and names it in errors
    def checked(*positional: Any, **named: Any) -> Any:
        expression = named.get("expression")
        if isinstance(expression, str):
            refuse_expression(expression)
        return calculate(*positional, **named)

    return checked
