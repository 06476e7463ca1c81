"""The directory of a durable store: one process, one set of tensors.

Layout::

    manifest.json            what is valid: signature, versions, parents, files; replaced atomically
    digests-<v>.bin          uint64 per tensor, the digests of version v
    record-<v>.delta         the record between v and its parent
    keyframe-<v>.delta       a full copy of v
    lock                     held while a store uses the directory

Recovery rule: the manifest is the truth. A file that it does not name is a leftover of a crash and is removed; a file
that it names was complete and on the disk before the manifest was.
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from megatron_async.snapshots.errors import DamagedRecordError, SnapshotBusyError, TensorSetError
from megatron_async.snapshots.record_file import replace_file

FORMAT = 2
"""1 had other digests."""


def record_path(folder: Path, version: int) -> Path:
    """Where a durable store over `folder` keeps the record between a version and its parent."""
    return folder / f"record-{version:08d}.delta"


@dataclass(slots=True)
class Entry:
    """What the manifest says of a version."""

    parent: int | None
    checksum: str
    record: bool
    keyframe: bool


class Directory:
    """Files of a store, and the manifest that makes them count.

    Raises (from the constructor):
        SnapshotBusyError: another store uses the directory.
        TensorSetError: it was written for other tensors.
        DamagedRecordError: the manifest cannot be read.
    """

    def __init__(self, path: Path, signature: str, budget: int | None) -> None:
        self.path = path
        self.budget = budget
        self._signature = signature
        path.mkdir(parents=True, exist_ok=True)
        self._lock = (path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise SnapshotBusyError(
                f"{path} is used by another snapshot store. Give each rank its own directory, and close the other store"
            ) from error
        self.behind = False
        """The manifest on the disk may differ from `entries`: what it may name must stay."""
        self.entries = self._load()
        self._remove_leftovers()

    def record_path(self, version: int) -> Path:
        return record_path(self.path, version)

    def keyframe_path(self, version: int) -> Path:
        return self.path / f"keyframe-{version:08d}.delta"

    def staged_path(self, number: int) -> Path:
        """Where a record waits for its version; a leftover after a crash."""
        return self.path / f"staged-{number}.delta"

    def digests_path(self, version: int) -> Path:
        return self.path / f"digests-{version:08d}.bin"

    def _load(self) -> dict[int, Entry]:
        manifest = self.path / "manifest.json"
        if not manifest.exists():
            return {}
        try:
            content = json.loads(manifest.read_text())
            version, signature = content["format"], content["signature"]
            entries = {int(key): Entry(**value) for key, value in content["versions"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedRecordError(
                f"{manifest} cannot be read ({error}). Restore it from a copy, or move the directory "
                "away to start a new "
                "history; tokens of older versions then cannot be scored"
            ) from error
        if (version, signature) != (FORMAT, self._signature):
            raise TensorSetError(
                f"{self.path} holds the history of other tensors (format {version}, signature {signature}; these have "
                f"format {FORMAT}, signature {self._signature}). Names, dtypes, shapes and task_words "
                "must be the same: "
                "use the layout that the directory was written with, or another directory"
            )
        return entries

    def _named(self) -> set[Path]:
        named = {self.path / "manifest.json", self.path / "lock"}
        for version, entry in self.entries.items():
            named.add(self.digests_path(version))
            if entry.record:
                named.add(self.record_path(version))
            if entry.keyframe:
                named.add(self.keyframe_path(version))
        return named

    def _remove_leftovers(self) -> None:
        named = self._named()
        for pattern in ("*.delta", "digests-*.bin", "*.partial"):
            for path in self.path.glob(pattern):
                if path not in named:
                    path.unlink()

    def put(
        self, version: int, parent: int | None, digests: np.ndarray, *, record: bool, keyframe: bool
    ) -> None:
        """Make a version count; its files are complete.

        Raises:
            DiskFullError: the manifest is as it was.
        """
        content = digests.astype("<u8").tobytes()
        replace_file(self.digests_path(version), content)
        before = self.entries.get(version)
        self.entries[version] = Entry(parent, xxhash.xxh3_128_hexdigest(content), record, keyframe)
        try:
            self._write()
        except BaseException:
            if before is None:
                del self.entries[version]
            else:
                self.entries[version] = before
            raise

    def remove(self, version: int) -> None:
        """Make a version not count any more, then remove its files.

        Raises:
            DiskFullError: the manifest on the disk, and the files, are as they were.
        """
        if self.entries.pop(version, None) is not None or self.behind:
            self._write()
        for path in (self.digests_path(version), self.record_path(version), self.keyframe_path(version)):
            path.unlink(missing_ok=True)

    def withdraw(self, version: int) -> None:
        """Make a version not count any more, and leave its record to whoever made it."""
        if self.entries.pop(version, None) is not None or self.behind:
            self._write()
        self.digests_path(version).unlink(missing_ok=True)

    def _write(self) -> None:
        versions = {
            str(version): {
                "parent": entry.parent, "checksum": entry.checksum, "record": entry.record, "keyframe": entry.keyframe
            }
            for version, entry in sorted(self.entries.items())
        }  # fmt: skip
        content = {"format": FORMAT, "signature": self._signature, "versions": versions}
        self.behind = True
        replace_file(self.path / "manifest.json", json.dumps(content, indent=1).encode())
        self.behind = False

    def digests(self, version: int) -> np.ndarray:
        """uint64[tensors] of a version.

        Raises:
            DamagedRecordError: the file is missing or altered.
        """
        path = self.digests_path(version)
        content = path.read_bytes() if path.exists() else b""
        if xxhash.xxh3_128_hexdigest(content) != self.entries[version].checksum:
            raise DamagedRecordError(
                f"{path}: the digests of version {version} are missing or altered. Restore the file from "
                "a copy, or move "
                "the directory away to start a new history"
            )
        return np.frombuffer(content, "<u8").astype(np.uint64)

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.path.iterdir() if path.is_file())

    def room(self) -> int | None:
        """Bytes left of the budget; None without one."""
        return None if self.budget is None else max(0, self.budget - self.used)

    def close(self) -> None:
        self._lock.close()
