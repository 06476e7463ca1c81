"""One launcher per run folder: two would delete, or write into, each other's files.

Invariant: the claim is the kernel's lock on `<run folder>/.claim`, so it ends with the process that holds it, however
that process ends; nothing is ever left to clean up. Child processes do not inherit it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_async.errors import UserError

CLAIM_FILE = ".claim"


@contextmanager
def claimed(run_path: Path) -> Iterator[None]:
    """Make the run's folder and hold it while the block runs.

    Raises UserError when the folder cannot be made or written, or another process holds it (naming its pid).
    """
    try:
        run_path.mkdir(parents=True, exist_ok=True)
        file = (run_path / CLAIM_FILE).open("a+")
    except OSError as error:
        raise UserError(
            f"the run's folder {run_path} cannot be written ({error.strerror}: {error.filename}); choose another place "
            "(--set run_dir=...), or mend its permissions"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{run_path} is in use: process {file.read().strip() or '(unknown)'} runs there. Stop it or wait for "
                "its end, or choose another name (--set name=...)."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
