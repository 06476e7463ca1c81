"""What a server takes over from the process that started it: its life, and the key.

A server ends with that process, however it ended.

The starter puts its process id in the environment; the server polls its parent. A poll rather than the kernel's
parent-death signal: that one fires when the starting *thread* ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT_VARIABLE = "SGLANG_BRIDGE_PARENT"
KEY_VARIABLE = "SGLANG_BRIDGE_KEY"
"""The key that clients must send. Taken out of the environment before anything else is started."""
_POLL_S = 0.5


def end_with_parent() -> None:
    """Watch the starting process, when one is named, and SIGKILL this process group once it is gone."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None:
        threading.Thread(target=_watch, args=(int(parent),), name="parent-watch", daemon=True).start()


def take_key(arguments: list[str]) -> list[str]:
    """The server's arguments with the key that the environment holds, which is taken out of it."""
    key = os.environ.pop(KEY_VARIABLE, "")
    return [*arguments, "--api-key", key] if key else arguments


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
