"""Text that comes from outside, such as a model's output in a reason, made fit for every database.

PostgreSQL takes no NUL and nothing longer than a column, SQLite takes both: what is stored is the same on either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from sqlalchemy import String, Text
from sqlalchemy.types import TypeDecorator

LONGEST_ID = 255
"""Characters of an id."""
IDS_AT_ONCE = 512
"""In one statement: keeps the number of its parameters below every database's limit."""
LONGEST_REASON = 4_000
"""Characters of a reason; what is longer ends in an ellipsis."""


def cleaned(text: str) -> str:
    """The text without NUL and lone surrogates, which no database stores as UTF-8."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def chunks(names: Iterable[str], most: int) -> Iterator[list[str]]:
    """The names in their order, at most so many at a time."""
    rest = iter(names)
    while chunk := list(islice(rest, most)):
        yield chunk


def shortened_id(text: str) -> str:
    """An id that data came with, cleaned; a long one keeps its beginning and gets a digest, so it stays unique."""
    clean = cleaned(text)
    if clean == text and len(text) <= LONGEST_ID:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{clean[: LONGEST_ID - len(digest) - 1]}~{digest}"


class Reason(TypeDecorator[str]):
    """A column of words for people."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        if value is None:
            return None
        clean = cleaned(value)
        return (
            clean if len(clean) <= LONGEST_REASON else f"{clean[: LONGEST_REASON - 1]}\N{HORIZONTAL ELLIPSIS}"
        )


class ForeignId(TypeDecorator[str]):
    """A column of ids that data came with: looked up and stored as `shortened_id` says."""

    impl = String(LONGEST_ID)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else shortened_id(value)
