"""History of weights: lossless differences between versions, restored in place, bit for bit.

Works on named tensors and knows neither what a model is nor who trains it. Start with `SnapshotStore`.
"""

from megatron_async.snapshots.errors import (
    BudgetExceededError,
    DamagedRecordError,
    DigestMismatchError,
    DiskFullError,
    SnapshotBusyError,
    SnapshotError,
    TensorSetError,
    UnknownVersionError,
)
from megatron_async.snapshots.full_copy import FullCopyStore
from megatron_async.snapshots.history import CaptureReport, Journey, TravelReport, WeightHistory
from megatron_async.snapshots.settings import SnapshotConfig
from megatron_async.snapshots.store import SnapshotStore

__all__ = [
    "BudgetExceededError",
    "CaptureReport",
    "DamagedRecordError",
    "DigestMismatchError",
    "DiskFullError",
    "FullCopyStore",
    "Journey",
    "SnapshotBusyError",
    "SnapshotConfig",
    "SnapshotError",
    "SnapshotStore",
    "TensorSetError",
    "TravelReport",
    "UnknownVersionError",
    "WeightHistory",
]
