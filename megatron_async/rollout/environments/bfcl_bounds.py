"""Calls of BFCL's simulated APIs that would take for ever, found before they are made.

Four functions of its MathAPI compute as much as their arguments say, and its file system shares the contents of a
copied directory, so that copying and moving can build a tree without end, in which every search is endless. All other
functions take time in proportion to what is there and to the length of their arguments.

Invariants
- A call that the benchmark answers in no time is made as it is, with the benchmark's answer.
- A refused power gets the error that the benchmark ends with: its result has too many digits to be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_async.rollout.environments.arithmetic import TooLarge, refuse_power

MOST_DIGITS = 10_000
"""Digits to which logarithms and roots are computed."""
MOST_ENTRIES = 10_000
"""Files and directories of the largest file system; the benchmark's own have at most 124."""

_UNPRINTABLE = (
    "Exceeds the limit (4300 digits) for integer string conversion; use sys.set_int_max_str_digits() to increase the "
    "limit"
)
_LONGEST_NUMBER = 50
"""Characters of a number that is written as text."""


class Refused(ValueError):
    """The call is not made; the message is what the agent reads."""


def bounded_arguments(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which the MathAPI may be called, by the names of its parameters.

    Raises Refused for a call that would compute for long.
    """
    result = dict(arguments)
    if name == "power":
        try:
            refuse_power(result.get("base"), result.get("exponent"))
        except TooLarge:
            raise Refused(_UNPRINTABLE) from None
    elif name in ("logarithm", "square_root"):
        _refuse_precision(result.get("precision"))
        for number in result.values():
            _refuse_written(number)
    elif name == "round_number" and isinstance(result.get("decimal_places"), int):
        # a whole number has at most 4300 digits, so all that are further left round it to 0 as well
        result["decimal_places"] = max(result["decimal_places"], -MOST_DIGITS)
    return result


def _refuse_precision(precision: Any) -> None:
    try:
        digits = int(precision)
    except (TypeError, ValueError, OverflowError):
        return  # no precision at all: the API says so
    if digits > MOST_DIGITS:
        raise Refused(f"a precision of {digits} digits is more than {MOST_DIGITS}")


def _refuse_written(number: Any) -> None:
    """mpmath reads numbers from text too, with exponents of any length, which take it minutes."""
    if isinstance(number, str) and len(number) > _LONGEST_NUMBER:
        raise Refused(f"a number of {len(number)} characters")


def endless(file_system: Any) -> bool:
    """Whether a file system of the benchmark has more than `MOST_ENTRIES` entries, or contains itself."""
    entries, waiting = 0, [file_system.root]
    while waiting and entries <= MOST_ENTRIES:
        contents = waiting.pop().contents
        entries += len(contents)
        waiting.extend(item for item in contents.values() if hasattr(item, "contents"))
    return entries > MOST_ENTRIES
