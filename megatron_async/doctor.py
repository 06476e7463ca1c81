"""`megatron-async doctor`: is this machine ready, and what to do about each thing that is not.

Invariants: nothing is changed and no engine is imported, so it is quick and works where they are broken; every finding
that is not fine says what to do; the exit code is 1 when something must be mended before a run, else 0.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_async.config import ConfigError, check
from megatron_async.config.estimate import GIB, bytes_text
from megatron_async.config.schema import RunConfig

Level = Literal["ok", "note", "warning", "error"]

PYTHON_VERSIONS = ((3, 11), (3, 12))
ENGINES = {"torch": "2.13.0", "megatron-core": "0.16.1", "sglang": "0.5.23", "transformers": "5.19.0"}
"""Packages whose exact version the code was written against; requirements/ pins the same."""
LIBRARIES = (
    "numpy", "pyyaml", "sqlalchemy", "aiohttp", "rich", "psutil", "safetensors", "tokenizers", "tensorboard",
    "matplotlib", "msgspec", "numba", "orjson", "xxhash", "zstandard", "xgrammar",
)  # fmt: skip
SETUP = "run `bash recipes/setup.sh` and use .venv/bin/python"

_MEMORY_NEEDED, _DISK_NEEDED, _SHM_NEEDED = 6 * GIB, 5 * GIB, GIB // 4
_FILES_NEEDED = 4096
_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    subject: str
    level: Level
    found: str
    advice: str = ""
    """What to do; empty only when the level is ok or note."""


def python_finding(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """Whether this Python can run the pinned stack."""
    found = f"{version[0]}.{version[1]} at {sys.executable}"
    if version in PYTHON_VERSIONS:
        return Finding("Python", "ok", found)
    return Finding(
        "Python", "error", found, "the pinned stack needs 3.11 or 3.12: set PYTHON=python3.11 and " + SETUP
    )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def engine_finding(package: str, wanted: str, installed: str | None) -> Finding:
    """Whether an engine has the version the code was written against; a local suffix (+cpu) is no difference."""
    if installed is None:
        return Finding(package, "error", "not installed", SETUP)
    if installed.split("+")[0] == wanted:
        return Finding(package, "ok", installed)
    # Megatron-core and SGLang are adjusted to and spoken to in ways that change between versions.
    level: Level = "error" if package in ("megatron-core", "sglang") else "warning"
    return Finding(
        package, level, installed, f"written and tested against {wanted}: pip install {package}=={wanted}"
    )


def _packages() -> Iterator[Finding]:
    for package, wanted in ENGINES.items():
        yield engine_finding(package, wanted, _installed(package))
    missing = [package for package in LIBRARIES if _installed(package) is None]
    if missing:
        yield Finding("libraries", "error", f"missing: {', '.join(missing)}", SETUP)
    else:
        yield Finding("libraries", "ok", f"{len(LIBRARIES)} found")


def memory_finding(available: int, total: int) -> Finding:
    """Free memory against what trainer ranks and one engine take for the tiny model."""
    found = f"{bytes_text(available)} available of {bytes_text(total)}"
    if available >= _MEMORY_NEEDED:
        return Finding("memory", "ok", found)
    return Finding(
        "memory",
        "error",
        found,
        f"the quickstart needs {bytes_text(_MEMORY_NEEDED)}: stop other programs first",
    )


def shm_finding(path: Path = Path("/dev/shm")) -> Finding:
    """Room in shared memory, which engines use between their processes."""
    if not path.is_dir():
        return Finding("shared memory", "error", f"{path} is missing", f"mount a tmpfs at {path}")
    free = shutil.disk_usage(path).free
    if free >= _SHM_NEEDED:
        return Finding("shared memory", "ok", f"{bytes_text(free)} free in {path}")
    return Finding(
        "shared memory",
        "error",
        f"{bytes_text(free)} free in {path}",
        f"needs {bytes_text(_SHM_NEEDED)}: start the container with --shm-size=8g, or remove stale files there",
    )


def disk_finding(folder: Path) -> Finding:
    """Room where runs are written."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{bytes_text(free)} free for {folder}"
    if free >= _DISK_NEEDED:
        return Finding("disk", "ok", found)
    return Finding(
        "disk", "warning", found, "a run with checkpoints wants 5 GiB: set run_dir to a larger disk"
    )


def _ports() -> Finding:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "?")
        return Finding(
            "ports",
            "error",
            f"cannot listen on 127.0.0.1 ({name})",
            "allow sockets on the loopback interface",
        )
    return Finding("ports", "ok", f"can listen on 127.0.0.1 (tried {port})")


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count >= 2:
        return Finding("cores", "ok", str(count))
    return Finding(
        "cores", "warning", str(count), "trainer and engine take turns on one core: expect a long run"
    )


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _FILES_NEEDED:
        return Finding("open files", "ok", str(soft))
    return Finding(
        "open files",
        "warning",
        f"{soft} (hard limit {hard})",
        f"many agents at once need ulimit -n {_FILES_NEEDED}",
    )


def _gpus() -> Iterator[Finding]:
    if importlib.util.find_spec("pynvml") is None:
        yield Finding("GPUs", "note", "unknown: nvidia-ml-py is not installed; runs on the CPU profile")
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Finding("GPUs", "note", f"none ({error}); runs on the CPU profile")
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            yield gpu_finding(
                index, str(pynvml.nvmlDeviceGetName(handle)), int(memory.free), int(memory.total)
            )
    finally:
        pynvml.nvmlShutdown()
    if _installed("transformer-engine") is None:
        yield Finding(
            "transformer-engine",
            "warning",
            "not installed",
            "Megatron's fast layers need it: pip install --no-build-isolation -e '.[transformer-engine]'",
        )


def gpu_finding(index: int, name: str, free: int, total: int) -> Finding:
    """A GPU and how much of its memory is free."""
    found = f"{name}, {bytes_text(free)} free of {bytes_text(total)}"
    if free >= total // 2:
        return Finding(f"GPU {index}", "ok", found)
    return Finding(
        f"GPU {index}", "warning", found, "more than half is taken: see nvidia-smi for who uses it"
    )


def _configuration(config: RunConfig) -> Iterator[Finding]:
    try:
        warnings = check(config, starts_engines=True)
    except ConfigError as error:
        yield from (
            Finding("configuration", "error", problem, "change the option named")
            for problem in error.problems
        )
        return
    yield from (
        Finding("configuration", "warning", warning, "see the sentence itself") for warning in warnings
    )
    if not warnings:
        yield Finding("configuration", "ok", config.name)


def examine(config: RunConfig | None = None) -> list[Finding]:
    """Look at everything; with a configuration, at its ports, checkpoint and arithmetic too."""
    memory = psutil.virtual_memory()
    findings = [python_finding(), *_packages(), _cores(), memory_finding(memory.available, memory.total)]
    findings += [
        shm_finding(),
        disk_finding(Path(config.run_dir if config else ".")),
        _files(),
        _ports(),
        *_gpus(),
    ]
    if config is not None:
        findings += _configuration(config)
    return findings


def exit_code(findings: list[Finding]) -> int:
    """1 when something must be mended before a run."""
    return int(any(finding.level == "error" for finding in findings))


def main(config: RunConfig | None = None, console: Console | None = None) -> int:
    """Print all findings and a last line with the verdict; returns the exit code."""
    findings = examine(config)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        style = _STYLES[finding.level]
        table.add_row(Text(finding.level, style=style), finding.subject, Text(finding.found))
        if finding.advice:
            table.add_row("", "", Text(f"-> {finding.advice}", style=style))
    output = console or Console(highlight=False)
    output.print(table)
    errors = sum(finding.level == "error" for finding in findings)
    output.print(
        "Ready." if not errors else f"{errors} thing(s) to mend before a run (see the lines with ->)."
    )
    return exit_code(findings)
