"""``python -m sglang_bridge.serve --model-path M --port P ...``: the SGLang server on whatever this machine is.

Takes every argument of ``python -m sglang.launch_server``. With a GPU it is that command. Without one it first
installs the CPU adjustments (``cpu_backend``). They hold in every process of the server: SGLang spawns its
scheduler and detokenizer, and a spawned process imports this main module again before anything else.
"""

from __future__ import annotations

import contextlib
import os
import sys

import psutil

from sglang_bridge.lifetime import end_with_parent, take_key

if __name__ == "__main__":
    end_with_parent()  # before the imports below, which take seconds
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported; two threads are far slower

from sglang_bridge import cpu_backend, platform

if not platform.has_accelerator():
    cpu_backend.install()


def main(arguments: list[str]) -> None:
    """Run the server until it is told to stop. A key is taken from the environment, and out of it."""
    arguments = take_key(arguments)
    if not platform.has_accelerator():
        arguments = cpu_backend.add_server_flags(arguments)
    from sglang.launch_server import load_plugins, prepare_server_args, run_server

    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        _end_children()


def _end_children() -> None:
    """SIGKILL all processes of this server but Python's resource tracker, which then removes their semaphores."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):
                child.kill()


if __name__ == "__main__":
    main(sys.argv[1:])
