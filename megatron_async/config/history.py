"""Where old log-probs come from, and the history of weights behind them; part of `config.schema`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class OldLogitsConfig:
    """Where the old log-probs of a token come from."""

    source: str = "auto"
    """Which weights score the batch. It follows from `objective.anchor`, so "auto" is right; the anchor `snapshot` can
    also be had from `snapshot_full`, which keeps whole copies of the weights instead of differences."""
    reuse_training_forward: bool = True
    """Take the log-probs of the starting weights from the first training forward instead of a pass of their own, where
    the two are the same numbers. Saves one forward per step."""


@dataclass(frozen=True, slots=True)
class SnapshotsConfig:
    """The history of the weights, read when old log-probs come from it (`objective.anchor: snapshot`). Every trainer
    rank keeps its own part, in the run's folder and in its own memory; all sizes are per rank."""

    host_bytes: int | None = None
    """Preallocated host memory for the history. null: as much as the rank's weights take, which holds many versions as
    differences; for full copies, one for each version of the staleness window and three more. Too little moves records
    to disk, where restoring is slower, or refuses a version with the arithmetic."""
    device_bytes: int = 0
    """Memory on the accelerator for the newest records. Restoring from it is fastest; it is taken from activations."""
    disk_bytes: int | None = None
    """Disk for the history. null: what the disk has. 0 keeps nothing there: a crash then loses the history, and with it
    the old log-probs of tokens that were not trained yet."""
    durable: bool = True
    """Write every record to disk at once, so that a crash loses none. false writes only what memory cannot hold."""
    shadow: bool | None = None
    """Keep a copy of the weights to compare every new version with. null: only where the weights have no fp32 masters
    (`model.dtype: float32`). Without it the difference is taken inside the optimiser step, before the new bits are
    written: no copy, but the step waits for it, and gathers each tensor once more under the distributed optimiser."""
    keyframe_every: int = 0
    """Keep a full copy every so many versions; 0 never. Bounds the steps of a walk, costs a copy of the weights each;
    walks are as long as the staleness window, so it pays only for wide windows or as insurance against bad disks."""
    verify: Literal["full", "off"] = "full"
    """Compare digests of all weights whenever a version was put in place and after coming back: one reading of the
    weights each. off trusts memory and disk."""
    compression_level: int = 1
    """zstd level of what goes to disk; 0 writes it as it is. Higher is smaller and slower."""
    background: bool = True
    """Record a version while it is published. false makes the loop wait for it."""
    eager: bool = True
    """Score finished trajectories while the trainer waits for its batch, so that little is left to do when it comes.
    Costs nothing but idle time, delays a batch by at most one round of micro-batches."""
    threads: int = 1
    """Threads that encode and restore. They share the rank's cores with its forward pass, though never at once."""
