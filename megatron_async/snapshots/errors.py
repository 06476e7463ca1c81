"""What can go wrong with the history of the weights.

Invariant: whichever of these is raised, the live weights hold exactly the bits they held before the call, and every
message names the version, the place (tensor, file or tier) and what to do about it.
"""

from __future__ import annotations


class SnapshotError(RuntimeError):
    """Base of every error of the snapshot store."""


class TensorSetError(SnapshotError):
    """The named tensors cannot be versioned, or are not the ones a directory was written for."""


class UnknownVersionError(SnapshotError):
    """A version was asked for that the store does not hold, or that no chain of records reaches."""


class DigestMismatchError(SnapshotError):
    """Weights do not have the bits that their version was published with."""


class DamagedRecordError(SnapshotError):
    """A record or a manifest on disk is truncated, altered or unreadable."""


class BudgetExceededError(SnapshotError):
    """The declared budgets cannot hold every needed version; carries the arithmetic."""


class DiskFullError(BudgetExceededError):
    """The disk, or its declared budget, has no room for a record."""


class SnapshotBusyError(SnapshotError):
    """Another thread or process uses the weights or the directory, or the weights are at an older version."""
