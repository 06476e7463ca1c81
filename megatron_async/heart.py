"""The sign of life of a part's process: a thread that touches a file, whatever the rest of the process computes.

It proves that the process is not stopped and that its interpreter runs, and nothing more: a long step, a save or a
compilation does not silence it. `health` watches it from outside. A touched file needs no room on the disk.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

BEATS_VARIABLE = "MEGATRON_ASYNC_BEATS"
"""Environment variable of a part's processes: the folder in which each has a file named by its process id."""
STACKS_SIGNAL = signal.SIGUSR1
"""Has a process that beats print the stacks of all its threads, also where its interpreter does not run."""
BEAT_S = 1.0


def beat(folder: Path, beat_s: float = BEAT_S) -> None:
    """Begin to beat, until the process ends."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    file = folder / str(os.getpid())
    _touch(file)
    threading.Thread(target=_beat, args=(file, beat_s), name="heart", daemon=True).start()


def _beat(file: Path, beat_s: float) -> None:
    while True:
        time.sleep(beat_s)
        _touch(file)


def _touch(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError:
        return  # a full disk takes no new file; without one nobody is waited for
