"""Passwords in addresses of databases: what is printed, logged or written for others to read has them left out."""

from __future__ import annotations

import re

_OF_USER = re.compile(r"(://[^:/]*:).*(?=@)", re.DOTALL)
"""From the user's name to the last `@`: hides too much of some addresses that are wrong, and too little of none."""
_IN_QUERY = re.compile(r"([?&](?:ssl)?password=)[^&]*", re.IGNORECASE)


def hide_password(url: str) -> str:
    """The address with `***` for its password; also of one that no database would understand.

    >>> hide_password("postgresql://me:pa55@db:5432/runs"), hide_password("sqlite:///runs/x/bank.sqlite")
    ('postgresql://me:***@db:5432/runs', 'sqlite:///runs/x/bank.sqlite')
    """
    return _IN_QUERY.sub(r"\1***", _OF_USER.sub(r"\1***", url))


def holds_password(url: str) -> bool:
    """Whether there is something to hide."""
    return hide_password(url) != url
