"""A step of the history as bytes, for another holder of the same weights to take.

Invariant: whoever takes the step ends with the bits of its version, which the digest proves; the step must be taken
from the bits of its parent.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from megatron_async.snapshots.directory import record_path
from megatron_async.snapshots.errors import DamagedRecordError, SnapshotError
from megatron_async.snapshots.record_file import RecordFile
from megatron_async.snapshots.store import SnapshotStore
from megatron_async.snapshots.tiers import Record
from megatron_async.snapshots.walker import Weights


class _Header(msgspec.Struct, frozen=True):
    version: int
    parent: int
    digest: str


@dataclass(frozen=True, slots=True)
class VersionStep:
    """The difference between a version and its parent.

    digest: of the version, as `SnapshotStore.digest`. record: content of a record file.
    """

    version: int
    parent: int
    digest: str
    record: bytes

    def to_bytes(self) -> bytes:
        header = msgspec.json.encode(_Header(self.version, self.parent, self.digest))
        return struct.pack("<I", len(header)) + header + self.record

    @classmethod
    def from_bytes(cls, data: bytes) -> VersionStep:
        """Raises DamagedRecordError for anything but `to_bytes` output."""
        try:
            (length,) = struct.unpack_from("<I", data)
            header = msgspec.json.decode(data[4 : 4 + length], type=_Header)
        except (struct.error, msgspec.DecodeError) as error:
            raise DamagedRecordError(
                f"a step of the history arrived damaged ({len(data)} bytes): {error}"
            ) from error
        return cls(header.version, header.parent, header.digest, data[4 + length :])


def read_step(store: SnapshotStore, folder: Path, version: int, parent: int) -> VersionStep:
    """The step to a version that a durable store over `folder` has captured.

    Raises:
        UnknownVersionError: the store does not hold it. FileNotFoundError: the store is not durable.
    """
    return VersionStep(version, parent, store.digest(version), record_path(folder, version).read_bytes())


class Follower:
    """Takes steps on live tensors that a store watches.

    Args:
        tensors: the store's live tensors. scratch: a folder for the record that is being taken.
    """

    def __init__(self, store: SnapshotStore, tensors: Mapping[str, torch.Tensor], scratch: Path) -> None:
        self._store = store
        self._weights = Weights(tensors, task_words=store.config.task_words, threads=store.config.threads)
        self._scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)

    def take(self, step: VersionStep) -> None:
        """Step the tensors to the version, and capture it.

        Raises:
            SnapshotError: the step does not start at the live version; nothing changed.
            DamagedRecordError: the record is damaged; nothing changed.
            DigestMismatchError: the bits are not the version's; the tensors are where the step led, uncaptured.
        """
        if step.parent != self._store.live_version:
            raise SnapshotError(
                f"the step to version {step.version} starts at version {step.parent}, but the weights are at "
                f"{self._store.live_version}; steps must be taken in the order they were made"
            )
        path = self._scratch / "step.delta"
        path.write_bytes(step.record)
        file = RecordFile(path)
        file.verify(self._weights.grid)
        segments = [file.segment(index) for index in range(len(self._weights.grid))]
        self._weights.walk([Record(f"version {step.version}", segments, file=file)], with_digest=False)
        self._store.capture(step.version, step.parent)
        if self._store.digest(step.version) != step.digest:
            raise SnapshotError(
                f"version {step.version} arrived with other bits than it was sent with (digest "
                f"{self._store.digest(step.version)}, expected {step.digest}); start the follower "
                "again from a checkpoint"
            )
