"""Errors of the configuration: all problems at once, each with its key, its value and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from megatron_async.errors import UserError


class ConfigError(UserError):
    """One or more things are wrong with a configuration.

    `problems` holds one line each; the message lists them all, so that one run of the program shows every mistake.
    """

    def __init__(self, problems: Sequence[str], where: str = "") -> None:
        self.problems = tuple(problems)
        self.where = where
        place = f" in {where}" if where else ""
        if len(self.problems) == 1:
            text = f"configuration{place}: {self.problems[0]}"
        else:
            lines = "\n".join(f"  - {problem}" for problem in self.problems)
            text = f"{len(self.problems)} problems with the configuration{place}:\n{lines}"
        super().__init__(text)


def nearest(word: str, legal: Iterable[str]) -> str:
    """A hint that names the nearest legal word, or all of them when none is near."""
    names = list(legal)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose from: {', '.join(names)}"
