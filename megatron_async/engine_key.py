"""The key that the engines of a run ask for, when others could reach them: a file in the run's folder, for its owner.

Invariants: the key is random, never on a command line, in a log that others can read, or in the environment of the
rollout; where the engines listen on loopback alone there is none.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from megatron_async.observe import RunFiles

_BYTES = 32


def ensure_key(files: RunFiles) -> str:
    """The run's key; made at the first call."""
    if not files.engine_key.exists():
        fresh = files.root / f".engine_key.{secrets.token_hex(8)}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(_BYTES))
        with contextlib.suppress(FileExistsError):  # another machine of the run was first: its key holds
            os.link(fresh, files.engine_key)
        fresh.unlink()
    return read_key(files.root)


def read_key(run_path: Path) -> str:
    """The run's key, or "" where its engines ask for none."""
    path = RunFiles(run_path).engine_key
    return path.read_text(encoding="ascii") if path.exists() else ""
