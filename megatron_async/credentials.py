"""Environment code gets no credentials: variables that hold keys, tokens or passwords are taken out of the process's
environment before any environment is imported or built, and while it is played.

Invariants: what an environment's own options name (a key that ends in `_env`, such as `api_key_env`) stays; processes
that environments start inherit nothing that was taken out. This keeps credentials out of logs, dumps and other people's
tools; it is no sandbox: code in this process can read whatever its user can read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # environments are also built in processes that have none of our packages
    from megatron_async.config.schema import EnvironmentConfig

_NAME = re.compile(
    r"(^|_)(api_?key|access_?key|secret(_?key)?|auth|token|credentials?|creds?|private_?key|auth_sock|pass|pat|jwt|bearer)"
    r"(_|$)|passw(or)?d|passphrase|pgpass|sshpass|connection_string|webhook|_dsn$|_pwd$|^netrc$|^kubeconfig$|_key$",
    re.IGNORECASE,
)
_VALUE = re.compile(r"^[a-z][a-z0-9+.-]*://[^/\s:@]*:[^@/\s]+@|^https?://[^/\s@]+@", re.IGNORECASE)
"""An address with a password in it, or of a web server with a token for a user."""


def is_credential(name: str, value: str) -> bool:
    """Whether a variable of this name and value looks like a credential.

    >>> is_credential("OPENAI_API_KEY", "x"), is_credential("TOKENIZERS_PARALLELISM", "false")
    (True, False)
    """
    return bool(_NAME.search(name) or _VALUE.match(value))


def named_by_options(options: Mapping[str, Any]) -> set[str]:
    """Variables that an environment's options ask for: the values of all keys that end in `_env`, at any depth."""
    named = set()
    for key, value in options.items():
        if isinstance(value, Mapping):
            named |= named_by_options(value)
        elif str(key).endswith("_env") and isinstance(value, str):
            named.add(value)
    return named


@contextmanager
def hidden_credentials(config: EnvironmentConfig) -> Iterator[None]:
    """Without credentials in `os.environ` while the block runs, but for those that the environment's options name.

    What builds an environment has it inside; whoever then plays it, or asks a task source for anything, holds it too.
    """
    wanted = named_by_options(config.options)
    hidden = {n: v for n, v in os.environ.items() if n not in wanted and is_credential(n, v)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
