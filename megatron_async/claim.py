"""One launcher per run folder, one evaluation per journal: two would delete, or write into, each other's files.

Invariant: the claim is the kernel's lock on a file (`<run folder>/.claim`), so it ends with the process that holds it,
however that process ends; nothing is ever left to clean up. Child processes do not inherit it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_async.errors import UserError

CLAIM_FILE = ".claim"


class InUse(UserError):
    """Another process, or another task of this one, holds the claim."""


@contextmanager
def claimed(run_path: Path) -> Iterator[None]:
    """Make the run's folder and hold it while the block runs.

    Raises UserError when the folder cannot be made or written, and InUse, naming the process, when another holds it.
    """
    what = f"the run's folder {run_path}"
    instead = "choose another name (--set name=...)"
    with held(run_path / CLAIM_FILE, what, f"{what} is in use", instead):
        yield


@contextmanager
def held(path: Path, what: str, in_use: str, instead: str) -> Iterator[None]:
    """Hold the lock file `path` while the block runs. what, in_use, instead: words of the errors.

    Raises UserError when it cannot be made or written, and InUse, naming the process, when another holds it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise UserError(
            f"{what} cannot be written ({error.strerror}: {error.filename}); choose another place "
            "(--set run_dir=...), or mend its permissions"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InUse(
                f"{in_use}: process {file.read().strip() or '(unknown)'} runs there. Stop it or wait for its end, or "
                f"{instead}."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
