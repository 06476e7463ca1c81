"""Which versions a store knows, how they hang together, and which of them must stay.

Invariants
- A version that is retained, declared needed, live or among the newest `keep_last` is never removed by `collect`, and
  every walk between two such versions stays possible.
- The manifest never names a file that is not complete, and files of removed versions go only after the manifest did.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_async.snapshots.bits import TensorSpec
from megatron_async.snapshots.directory import Directory
from megatron_async.snapshots.errors import (
    DamagedRecordError,
    DigestMismatchError,
    UnknownVersionError,
)
from megatron_async.snapshots.graph import Step, plan, removable
from megatron_async.snapshots.record_file import RecordFile
from megatron_async.snapshots.references import References
from megatron_async.snapshots.tiers import Record, Tiers

KEYFRAME_COST = 3.4
SHADOW_COST = 1.9
"""A copy, and the digests of the weights left and of the copy: these overwrite, so both are compared first."""


@dataclass(slots=True)
class Node:
    """A version: its digests per tensor (uint64), the record to its parent, its full copy."""

    parent: int | None
    digests: np.ndarray
    record: Record | None = None
    keyframe: Record | None = None


class Ledger:
    """Versions by number, references to them, and the walks between them."""

    def __init__(
        self, specs: tuple[TensorSpec, ...], tiers: Tiers, directory: Directory | None, keep_last: int
    ) -> None:
        self.nodes: dict[int, Node] = {}
        self._specs = specs
        self._full_bytes = max(1, sum(spec.nbytes for spec in specs))
        self._tiers = tiers
        self._directory = directory
        self._references = References(keep_last)
        self.damage: dict[int, str] = {}

    def reopen(self) -> None:
        """Read back what the directory holds; all of it is needed until `set_needed` says otherwise.

        A damaged record does not keep the store from opening: what is reachable without it can be used, and `damage`
        says what is wrong with the rest.

        Raises:
            DamagedRecordError: digests are damaged; names the file.
        """
        if self._directory is None:
            return
        for version, entry in self._directory.entries.items():
            node = self.nodes[version] = Node(entry.parent, self._directory.digests(version))
            if entry.record:
                path = self._directory.record_path(version)
                node.record = self._reopen_file(version, f"version {version}", path)
            if entry.keyframe:
                path = self._directory.keyframe_path(version)
                node.keyframe = self._reopen_file(version, f"keyframe {version}", path)
        self._references.declare(self.nodes)

    def _reopen_file(self, version: int, label: str, path: Path) -> Record | None:
        try:
            file = RecordFile(path)
        except DamagedRecordError as error:
            self.damage[version] = str(error)
            return None
        segments = [file.segment(index) for index in range(len(self._tiers.grid))]
        record = Record(label, segments, file=file)
        self._tiers.adopt(record, path)
        return record

    def node(self, version: int) -> Node:
        """A known version.

        Raises:
            UnknownVersionError: with what is known, and what to do.
        """
        if version not in self.nodes:
            where = f"the directory {self._directory.path}" if self._directory is not None else "memory"
            raise UnknownVersionError(
                f"version {version} is not in the store ({where} holds {sorted(self.nodes)}). Retain a version while "
                "any token needs it; tokens of a lost version can only be dropped or scored by another source"
            )
        return self.nodes[version]

    def add(self, version: int, node: Node, path: Path | None) -> None:
        """A version that was just captured, and its record's file."""
        self.nodes[version] = node
        if node.record is not None:
            self._tiers.adopt(node.record, path)

    def withdraw(self, version: int) -> None:
        """Undo `add` where it was, without freeing the record; the manifest names the version no longer.

        Raises:
            DiskFullError: the manifest could not be written, and names a version that memory does not know.
        """
        node = self.nodes.pop(version, None)
        if node is not None and node.record is not None:
            self._tiers.disown(node.record)
        if self._directory is not None:
            self._directory.withdraw(version)

    def compare(self, version: int, digests: np.ndarray) -> str | None:
        """The name of the first tensor whose digest is not the version's, or None."""
        differing = np.flatnonzero(self.node(version).digests != digests)
        return self._specs[int(differing[0])].name if differing.size else None

    def demand(self, version: int, digests: np.ndarray, what: str) -> None:
        """Raise DigestMismatchError unless the digests are the version's."""
        name = self.compare(version, digests)
        if name is not None:
            raise DigestMismatchError(
                f"{what} are not version {version}: the bits of tensor '{name}' differ. Load the weights that were "
                f"published as version {version}, or give the weights that you have another version number"
            )

    def blame(self, origin: int, target: int, name: str, digests: np.ndarray) -> DigestMismatchError:
        """The error for a walk that did not lead to its target's bits and was taken back.

        Tells changed live weights from a damaged record. digests: of the weights now. name: first wrong tensor.
        """
        changed = self.compare(origin, digests)
        if changed is not None:
            return DigestMismatchError(
                f"the live weights are no longer version {origin}: tensor '{changed}' was written after version "
                f"{origin} was captured, so version {target} cannot be reached from them. Capture after every update, "
                "write to weights only outside `with store.at(...)`, and load the weights of a captured version to go "
                "on"
            )
        return DigestMismatchError(
            f"the records from version {origin} to version {target} do not lead to its bits (tensor '{name}'); a "
            f"record in memory or on disk is damaged. The weights are at version {origin} as before; forget({target}) "
            "and drop or rescore its tokens"
        )

    # ---- references ----------------------------------------------------------------------------------------------

    def retain(self, version: int) -> None:
        self.node(version)
        self._references.retain(version)

    def release(self, version: int) -> None:
        self._references.release(version)

    def set_needed(self, versions: Iterable[int]) -> None:
        needed = set(versions)
        for version in needed:
            self.node(version)
        self._references.declare(needed)

    def collect(self, live: int) -> list[int]:
        """Remove what is neither kept nor between two kept versions, nor the last keyframe before one."""
        kept = self._references.kept(self.nodes, live)
        keyframes = [version for version, node in self.nodes.items() if node.keyframe is not None]
        anchors = {max(before) for v in kept if (before := [key for key in keyframes if key <= v])}
        parents = {
            v: node.parent for v, node in self.nodes.items() if node.record and node.parent is not None
        }
        gone = sorted(removable(self.nodes, parents, kept | anchors))
        for version in gone:
            self.remove(version)
        return gone

    def remove(self, version: int) -> None:
        """Remove a version, its record, and the record of any child.

        Raises:
            DiskFullError: the manifest could not be written; the version is gone from memory, and its files stay.
        """
        node = self.nodes.pop(version)
        children = [child for child, other in self.nodes.items() if other.parent == version]
        records = [node.record, node.keyframe, *(self.nodes[child].record for child in children)]
        for child in children:
            self.nodes[child].parent, self.nodes[child].record = None, None
        self._references.forget(version)
        self.damage.pop(version, None)
        free = self._tiers.leave
        try:
            for child in children:
                self.publish(child, only_known=True)
            if self._directory is not None:
                self._directory.remove(version)
            free = self._tiers.drop
        finally:
            for record in records:
                if record is not None:
                    free(record)

    def publish(self, version: int, only_known: bool = False) -> None:
        """Bring the manifest in line with what is known of a version."""
        if self._directory is None or (only_known and version not in self._directory.entries):
            return
        node = self.nodes[version]
        self._directory.put(
            version,
            node.parent,
            node.digests,
            record=node.record is not None and node.record.file is not None,
            keyframe=node.keyframe is not None and node.keyframe.file is not None,
        )

    # ---- walks ---------------------------------------------------------------------------------------------------

    def _record_cost(self, record: Record) -> float:
        """In full copies of the weights: measured on one core, see host_kernels."""
        return min(0.75, 0.1 + 10 * record.nbytes / self._full_bytes)

    def plan(self, origin: int, target: int, shadow: int | None) -> list[Step] | None:
        """The cheapest walk, None when there is none; `shadow` is the version that a shadow copy holds."""
        parents = {
            version: (node.parent, self._record_cost(node.record))
            for version, node in self.nodes.items()
            if node.record is not None and node.parent is not None
        }
        copies = {version: KEYFRAME_COST for version, node in self.nodes.items() if node.keyframe is not None}
        if shadow is not None:
            copies[shadow] = SHADOW_COST
        return plan(origin, target, parents, copies)

    def demand_plan(self, origin: int, target: int, shadow: int | None) -> list[Step]:
        """As `plan`.

        Raises:
            UnknownVersionError: no walk.
            DamagedRecordError: no walk, and records were found damaged at opening.
        """
        self.node(target)
        steps = self.plan(origin, target, shadow)
        if steps is None and self.damage:
            raise DamagedRecordError(f"version {target} cannot be reached. " + " ".join(self.damage.values()))
        if steps is None:
            raise UnknownVersionError(
                f"no chain of records leads from version {origin} to version {target}: the history "
                "between them was not "
                "captured or is lost. Load the weights of a version next to it, or set keyframe_every"
            )
        return steps

    def record(self, step: Step) -> Record:
        """The record that a step goes along."""
        record = self.nodes[step.key].record
        assert record is not None, f"the plan uses the record of version {step.key}, which has none"
        return record
