"""Options of the snapshot store."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.snapshots.errors import SnapshotError


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """How a store keeps versions.

    Attributes:
        host_bytes: preallocated host memory for records. Too small, and records move to disk, or captures are refused.
        device_bytes: memory on the weights' device for records; only useful where that is not the host.
        disk_bytes: limit for the store's directory; None for what the disk has.
        durable: with a directory, write every record at once, so that a crash loses none. Without, records reach the
            disk only when memory is full.
        shadow: keep a copy of the weights to compare with; see the module.
        threads: threads that encode and apply.
        keep_last: newest versions that stay although nothing retains them.
        keyframe_every: a full copy every so many versions (0: never). Bounds a walk, and makes versions before a lost
            record reachable; each costs a copy of the weights in host memory, or on disk if there is a directory.
        verify: "full" compares all digests before weights are used and after coming back (one reading of the weights,
            part of the same pass); "off" trusts the records.
        compression_level: zstd level on the way to disk; 0 to leave payloads as they are.
        compress_in_memory: compress in memory too: smaller by a third to a half, slower by a factor of five to ten.
        pin_memory: page-lock the host memory, for transfers to a device.
        task_words: words per unit of work; None for 4 Mi on a host and 16 Mi elsewhere.
        deadline_s: longest wait for weights that another thread uses.
    """

    host_bytes: int
    device_bytes: int = 0
    disk_bytes: int | None = None
    durable: bool = True
    shadow: bool = True
    threads: int = 1
    keep_last: int = 2
    keyframe_every: int = 0
    verify: str = "full"
    compression_level: int = 1
    compress_in_memory: bool = False
    pin_memory: bool = False
    task_words: int | None = None
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if self.verify not in ("full", "off"):
            raise SnapshotError(f"verify is '{self.verify}'; it is 'full' or 'off'")
        for name in ("host_bytes", "device_bytes", "keep_last", "keyframe_every", "compression_level"):
            if getattr(self, name) < 0:
                raise SnapshotError(f"{name} is {getattr(self, name)}; it cannot be negative")
        if self.threads < 1:
            raise SnapshotError(f"threads is {self.threads}; it must be at least 1")
