"""What an environment says about a reward, for people, as JSON.

Invariant: needs none of our packages, so that a process of another interpreter can do it too.
"""

from __future__ import annotations

import json
from typing import Any

_INT64 = 2**63


def readable(info: object) -> dict[str, Any]:
    """Words for people, as JSON: what JSON cannot hold (arrays of NumPy, NaN, huge integers) becomes text.

    A policy can make an environment repeat its arguments, so none of these is worth a failure of the episode.
    """
    try:
        text = json.dumps(info, default=_plain, ensure_ascii=False).encode("utf-8", "replace")
        value = json.loads(text, parse_int=_integer, parse_constant=str)
    except (TypeError, ValueError, RecursionError) as error:
        return {"unreadable": f"{type(error).__name__}: {error}"}
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"value": value}


def _plain(value: object) -> object:
    item = getattr(value, "item", None)  # a NumPy scalar
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else repr(value)


def _integer(digits: str) -> int | str:
    try:
        value = int(digits)
    except ValueError:  # thousands of digits
        return digits
    return value if -_INT64 <= value < 2 * _INT64 else digits
