"""What an evaluation asks, and whom: what its report must state, and what must be equal for episodes to be reused.

Invariants: a checkpoint is known by what its files hold, not by its path alone, so one that was trained again at the
same path is another policy; the same goes for files that an environment's options name. Credentials in an endpoint's
address are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from megatron_async.labels import TRAINED_ON
from megatron_async.rollout.environments.base import TaskSource

if TYPE_CHECKING:  # reports are also written in processes that have none of our packages
    from megatron_async.config.schema import RunConfig

_SMALL = 32 * 2**20
"""Bytes up to which a checkpoint's configuration, tokenizer and index are read whole."""
_TEXTS = (".json", ".jinja", ".txt", ".model")


@dataclass(frozen=True, slots=True)
class Subject:
    """Who is evaluated, and how.

    kind: "engines" (of a run), "checkpoint" or "endpoint". model: its name in results. place: the folder whose weights
    the engines began with, or the address. digest: of that folder (`checkpoint_digest`); "" for an endpoint. sampling,
    limits: what was asked for. seed: of the task source. training: what is known of its training, and how many of the
    evaluated tasks are among the tasks of it (`recorded_tasks.compared`); {} where nothing is.
    """

    kind: str
    model: str
    place: str
    digest: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    training: dict[str, Any] = field(default_factory=dict)

    def labels(self) -> dict[str, str]:
        """What about whom is evaluated makes a number incomparable with others."""
        shared = self.training.get("shared", 0)
        return {TRAINED_ON: str(shared)} if shared else {}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def conditions(config: RunConfig, source: TaskSource, subject: Subject, **more: Any) -> dict[str, Any]:
    """What must be equal for an episode of an earlier evaluation to count in this one; `more` beside the usual."""
    return {
        "subject": subject.as_dict(),
        "environment": asdict(config.environment),
        "files": file_digests(config.environment.options),
        "labels": labels_of(source),
        **more,
    }


def labels_of(source: TaskSource) -> dict[str, str]:
    """What a task source says every report about it must state; empty when nothing is unusual."""
    labels = getattr(source, "labels", None)
    return {str(name): str(value) for name, value in labels().items()} if callable(labels) else {}


def checkpoint_digest(folder: Path) -> str:
    """16 hex digits of a Hugging Face checkpoint: names, sizes and times of its files, its configuration, tokenizer and
    index, and the headers of its safetensors. The weights themselves are not read: that would take minutes."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        state = path.stat()
        digest.update(f"{path.name}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
        if path.suffix == ".safetensors":
            digest.update(_header(path))
        elif path.suffix in _TEXTS and state.st_size <= _SMALL:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def file_digests(options: Mapping[str, Any]) -> dict[str, str]:
    """Dotted name of each option, at any depth, whose value is a file -> 16 hex digits of what the file holds."""
    return {name: _file_digest(path) for name, path in _named_files(options, "")}


def without_password(url: str) -> str:
    """The address without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _named_files(value: Any, name: str) -> Iterator[tuple[str, Path]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_files(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _named_files(item, f"{name}.{number}")
    elif isinstance(value, str) and value and _is_file(value):
        yield name, Path(value)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or a null in it: some other text
        return False


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _header(path: Path) -> bytes:
    """A safetensors file begins with the length of its header (8 bytes, little-endian)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, _SMALL))


FILE = "evaluated.json"
"""In the folder of results, written before a task source reports by itself: what it reports about."""


def write_subject(folder: Path, stated: Mapping[str, Any]) -> None:
    """For `read_subject`, maybe in another process."""
    (folder / FILE).write_text(json.dumps(stated, indent=1), encoding="utf-8")


def read_subject(folder: Path) -> dict[str, Any]:
    """What `write_subject` wrote into the folder; empty where nothing was evaluated by `evaluate`."""
    path = folder / FILE
    stated: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return stated
