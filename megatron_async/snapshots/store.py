"""A history of the weights that costs what changed: capture every version, put any of them back, bit for bit.

Example::

    store = SnapshotStore(dict(model.named_parameters()), version=0, config=SnapshotConfig(host_bytes=8 << 30))
    optimizer.step()
    store.capture(1)                      # parent defaults to the version that was live
    with store.at(0):                     # the live tensors hold version 0, digests checked
        score(model)
    # the live tensors hold version 1 again, digests checked

A capture needs the bits of the version before. Two ways to have them:

- `shadow=True`: the store keeps one copy of the weights and compares against it. Simple, and the optimiser may write
  the weights as it likes; costs one copy of the model in the memory the weights are in.
- `shadow=False`: call `capture_update(version, tensors)` *before* the new bits are written, with the new tensors one by
  one (for instance the masters, cast). The record is encoded against the live weights, which are then stepped along it.
  Costs no copy, and the live weights change only once the record is safe.

Invariants
- Inside `at(v)` the live tensors have the digests that v was captured with, and after it those that they had before.
- Every error leaves the live weights as they were. A walk is planned, and its records checked, before the first bit
  changes.
- A version that is retained, live, or among the `keep_last` newest is never removed.
- A version number is never used twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_async.snapshots.bits import check_tensors, signature
from megatron_async.snapshots.codec import changed_share
from megatron_async.snapshots.directory import Directory
from megatron_async.snapshots.errors import (
    DigestMismatchError,
    SnapshotBusyError,
    SnapshotError,
)
from megatron_async.snapshots.history import CaptureReport, Journey, TravelReport
from megatron_async.snapshots.ledger import Ledger, Node
from megatron_async.snapshots.replicas import ReplicaGroup, owners_of
from megatron_async.snapshots.settings import SnapshotConfig
from megatron_async.snapshots.stream import encode_stream
from megatron_async.snapshots.tiers import Record, RecordBuilder, Tiers, memory_tiers
from megatron_async.snapshots.walker import Weights, version_digest

BACKGROUND = "snapshot-capture"
"""Name of the thread that captures in the background."""


class SnapshotStore:
    """See the module. All methods may be called from any thread; they take turns.

    Args:
        tensors: live tensors by name: contiguous, on one device, sharing no memory.
        version: the version whose bits they hold now.
        directory: where records survive; one per rank. An existing one is opened again, and then the live weights must
            be one of its versions, or a version it has not seen.
        replicas: the ranks that hold the same tensors, when they are to keep one copy of the history between them. A
            capture that is refused on one of them is not taken back on the others: end the run then.

    Raises:
        TensorSetError, SnapshotBusyError, DamagedRecordError: see the modules `bits` and `directory`.
        DigestMismatchError: the directory knows `version` with other bits.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        config: SnapshotConfig,
        directory: Path | str | None = None,
        replicas: ReplicaGroup | None = None,
    ) -> None:
        check_tensors(tensors)
        self.config = config
        self._weights = Weights(tensors, task_words=config.task_words, threads=config.threads)
        self._directory: Directory | None = None
        if directory is not None:
            text = signature(self._weights.specs, self._weights.task_words)
            self._directory = Directory(Path(directory), text, config.disk_bytes)
        self._tiers = Tiers(
            self._weights.grid,
            memory_tiers(config.device_bytes, config.host_bytes, config.pin_memory),
            compression_level=config.compression_level,
            compress_in_memory=config.compress_in_memory,
            disk_room=lambda: self._directory.room() if self._directory is not None else None,
        )
        self._replicas = replicas
        ranks, rank = (1, 0) if replicas is None else (replicas.size, replicas.rank)
        self._owned = [owner == rank for owner in owners_of(self._weights.specs, ranks)]
        self._ledger = Ledger(self._weights.specs, self._tiers, self._directory, config.keep_last)
        self._lock = threading.RLock()
        self._away = False
        self._background = ThreadPoolExecutor(1, BACKGROUND)
        self._pending: Future[CaptureReport] | None = None
        self._live = self._home = version
        self._captures_since_keyframe = 0
        try:
            self._open(version)
        except BaseException:
            self.close()
            raise
        self._shadow = self._weights.copy(self._owned) if config.shadow else None

    def _open(self, version: int) -> None:
        self._ledger.reopen()
        digests = self._weights.digests()
        if version in self._ledger.nodes:
            self._ledger.demand(version, digests, "the live weights at opening")
            return
        self._ledger.add(version, Node(None, digests), None)
        if self.config.durable:
            self._ledger.publish(version)

    def close(self) -> None:
        """Finish what runs and let go of the directory; files stay. Errors of a background capture are raised."""
        self._background.shutdown(wait=True)
        self._weights.close()
        if self._directory is not None:
            self._directory.close()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> SnapshotStore:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @property
    def live_version(self) -> int:
        """The version whose bits the live tensors hold."""
        return self._live

    def versions(self) -> list[int]:
        """Versions that can be restored from where the live weights are."""
        with self._turn():
            reachable = (
                v for v in self._ledger.nodes if self._ledger.plan(self._live, v, self._copy_of()) is not None
            )
            return sorted(reachable)

    def digest(self, version: int) -> str:
        """A text that two stores agree on exactly when every bit of the version agrees."""
        with self._turn():
            return version_digest(self._weights.specs, self._ledger.node(version).digests)

    def usage(self) -> dict[str, int]:
        """Bytes by tier: `shadow`, the memory tiers' records, and all files of the directory."""
        with self._turn():
            usage = {"shadow": sum(words.numel() * words.element_size() for words in self._shadow or ())}
            usage |= {tier.name: tier.used for tier in self._tiers.memory}
            usage["disk"] = self._directory.used if self._directory is not None else 0
            return usage

    def _copy_of(self) -> int | None:
        """The version that the shadow copy holds."""
        return self._home if self._shadow is not None and self._replicas is None else None

    def _whole(self, record: Record) -> Record:
        """The record with the parts that other replicas own."""
        return record if self._replicas is None else self._replicas.whole(record, self._weights.grid)

    def _builder_for(self, index: int, builder: RecordBuilder) -> RecordBuilder | None:
        return builder if self._owned[self._weights.grid[index].tensor] else None

    def retain(self, version: int) -> None:
        """Keep a version until it was released as often as it was retained.

        Raises:
            UnknownVersionError: it is not there.
        """
        with self._turn():
            self._ledger.retain(version)

    def release(self, version: int) -> None:
        """Undo one `retain`."""
        with self._turn():
            self._ledger.release(version)

    def set_needed(self, versions: Iterable[int]) -> None:
        """Declare, besides references, which versions must stay; replaces the declaration before.

        Raises:
            UnknownVersionError: one of them is not there; the declaration is as it was.
        """
        with self._turn():
            self._ledger.set_needed(versions)

    def collect(self) -> list[int]:
        """Remove every version that is neither kept nor between two kept ones; capture does this by itself."""
        with self._turn():
            self._refuse_away("collect()")
            return self._ledger.collect(self._live)

    def forget(self, version: int) -> None:
        """Remove a version whatever refers to it; what lies beyond it is then reachable by keyframes only.

        Raises:
            SnapshotError: it is the live one.
        """
        with self._turn():
            self._ledger.node(version)
            if version in (self._live, self._home):
                raise SnapshotError(f"version {version} is live and cannot be forgotten")
            self._ledger.remove(version)

    # ---- capture -------------------------------------------------------------------------------------------------

    def capture(self, version: int, parent: int | None = None) -> CaptureReport:
        """Record the step to the bits that the live tensors hold now.

        Args:
            version: the number of the new version, never used before.
            parent: the version before; it must be the live one, which is also the default.

        Raises:
            BudgetExceededError: no room; nothing was recorded, call again after releasing versions or raising budgets.
            SnapshotBusyError: called inside `at`.
            SnapshotError: the number was used, the parent is not the live version, or there is no shadow.
        """
        with self._turn():
            shadow = self._shadow
            if shadow is None:
                raise SnapshotError(
                    "capture() compares with a shadow copy; set shadow=True or use capture_update()"
                )
            weights = self._weights
            return self._capture(
                version, parent, shadow, lambda e: weights.run(lambda index, task: e(index, weights.of(task)))
            )

    def capture_update(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], parent: int | None = None
    ) -> CaptureReport:
        """Record the step to new bits, then take it: the live tensors hold them afterwards.

        Args:
            tensors: every tensor's new value, by name, in any order; each may be freed once the next is asked for.

        Raises:
            TensorSetError: a tensor is missing, unknown, given twice or of another shape or dtype.
            As `capture` otherwise. The live weights are as they were.
        """
        with self._turn():
            return self._capture(
                version,
                parent,
                self._weights.words,
                lambda encode: encode_stream(self._weights, tensors, encode),
            )

    def _capture(
        self,
        version: int,
        parent: int | None,
        old: list[torch.Tensor],
        fill: Callable[[Callable[[int, torch.Tensor], int]], list[int]],
    ) -> CaptureReport:
        self._check_capture(version, parent)
        self._ledger.collect(self._live)
        began, weights = time.perf_counter(), self._weights
        path = self._directory.record_path(version) if self._directory is not None else None
        builder = self._tiers.begin(f"version {version}", path)
        try:
            parts = fill(
                lambda index, new: weights.encode(
                    index, weights.of(weights.grid[index], old), new, self._builder_for(index, builder)
                )
            )
            encoded = time.perf_counter()
            record = builder.finish(durable=self.config.durable)
            written = time.perf_counter()
            self._ledger.add(version, Node(self._live, weights.per_tensor(parts), record), path)
            if record.file is not None:
                self._ledger.publish(version)
            followed = record if old is self._shadow else self._whole(record)
            weights.walk([followed], with_digest=False, words=old)
        except BaseException:
            if version in self._ledger.nodes:
                self._ledger.remove(version)
            else:
                builder.discard()
            raise
        parent, self._live, self._home = self._live, version, version
        durable = written - encoded
        self._maybe_keyframe(version)
        return CaptureReport(
            version,
            parent,
            record.nbytes,
            changed_share(weights.grid, record.segments),
            "disk" if record.tier is None else record.tier.name,
            time.perf_counter() - began - durable,
            durable,
        )

    def _check_capture(self, version: int, parent: int | None) -> None:
        self._refuse_away("capture()")
        self._weights.check_memory()
        if version in self._ledger.nodes:
            raise SnapshotError(
                f"version {version} was captured before; a version number is never used twice"
            )
        if parent is not None and parent != self._live:
            raise SnapshotError(
                f"the live weights came from version {self._live}, not from the given parent {parent}"
            )

    def capture_in_background(self, version: int, parent: int | None = None) -> Future[CaptureReport]:
        """Capture while the caller goes on; the live weights may be read (published), not written, until `settle`."""
        self.settle()
        self._refuse_away("capture_in_background()")
        self._pending = self._background.submit(self.capture, version, parent)
        return self._pending

    def settle(self) -> CaptureReport | None:
        """Wait for the capture in the background, and raise its error. Call it before the weights are written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if not wait([pending], timeout=self.config.deadline_s).done:
            self._pending = pending
            raise SnapshotBusyError(
                f"a capture has run in the background for more than {self.config.deadline_s} s"
            )
        return pending.result()

    # ---- keyframes -----------------------------------------------------------------------------------------------

    def _maybe_keyframe(self, version: int) -> None:
        self._captures_since_keyframe += 1
        if self.config.keyframe_every and self._captures_since_keyframe >= self.config.keyframe_every:
            self.keyframe()

    def keyframe(self) -> None:
        """Keep a full copy of the live version, in memory or, with a directory, on disk.

        Raises:
            BudgetExceededError: no room; the version itself is safe.
        """
        with self._turn():
            self._refuse_away("keyframe()")
            version, weights = self._live, self._weights
            node = self._ledger.node(version)
            if node.keyframe is not None:
                return
            path = self._directory.keyframe_path(version) if self._directory is not None else None
            builder = self._tiers.begin(f"keyframe {version}", path)
            if path is not None:
                builder.disk_only()

            def work(index: int, task: object) -> int:
                new = weights.of(weights.grid[index])
                return weights.encode(index, torch.zeros_like(new), new, self._builder_for(index, builder))

            try:
                self._ledger.demand(version, weights.per_tensor(weights.run(work)), "the live weights")
                node.keyframe = builder.finish(durable=False)
                self._ledger.publish(version)
            except BaseException:
                node.keyframe = None
                builder.discard()
                raise
            self._tiers.adopt(node.keyframe, path)
            self._captures_since_keyframe = 0

    # ---- travel --------------------------------------------------------------------------------------------------

    @contextmanager
    def at(self, version: int) -> Iterator[TravelReport]:
        """Live weights at a version while the block runs, and back where they were afterwards.

        Raises:
            UnknownVersionError, DamagedRecordError, DigestMismatchError: before the block; weights as they were.
            DigestMismatchError: after the block, when it wrote to the weights.
        """
        with self.journey() as journey:
            journey.go(version)
            yield journey.report

    @contextmanager
    def journey(self) -> Iterator[Journey]:
        """Visit several versions, one step each, and come back at the end: `journey.go(7); ...; journey.go(6)`."""
        with self._turn():
            outer, origin = self._away, self._live
            journey = Journey(self._go)
            self._away = True
            try:
                yield journey
            finally:
                began = time.perf_counter()
                try:
                    if journey.report.visited:
                        self._come_back(origin)
                finally:
                    self._away = outer
                    journey.report.return_seconds = time.perf_counter() - began

    def _come_back(self, origin: int) -> None:
        """Walk back; weights written to meanwhile are replaced by the shadow copy, and the error is raised."""
        try:
            self._go(origin)
        except DigestMismatchError:
            if origin == self._copy_of():
                self._enter(origin)
                self._live = origin
            raise

    def _go(self, target: int) -> int:
        """Walk to a version; returns the steps taken."""
        self._weights.check_memory()
        ledger, origin = self._ledger, self._live
        steps = ledger.demand_plan(origin, target, self._copy_of())
        ledger.demand_plan(target, self._home, self._copy_of())
        with_digest = self.config.verify == "full"
        for step in steps:
            if not step.absolute and (record := ledger.record(step)).tier is None and record.file is not None:
                record.file.verify(self._weights.grid)
        if steps and steps[0].absolute:
            if with_digest and (name := ledger.compare(origin, self._weights.digests())) is not None:
                raise self._mismatch(origin, target, name)
            self._enter(steps[0].to)
            self._live, steps = steps[0].to, steps[1:]
        records = [self._whole(ledger.record(step)) for step in steps]
        digests = self._weights.walk(records, with_digest=with_digest)
        name = None if digests is None else ledger.compare(target, digests)
        wrong = name is not None if self._replicas is None else self._replicas.any(name is not None)
        if wrong:
            self._weights.walk(records[::-1], with_digest=False)
            raise self._mismatch(self._live, target, name or "of another rank")
        self._live = target
        return len(records)

    def _mismatch(self, origin: int, target: int, name: str) -> DigestMismatchError:
        """Tell changed live weights from a damaged record; the walk was taken back."""
        changed = self._ledger.compare(origin, self._weights.digests())
        if changed is not None:
            return DigestMismatchError(
                f"the live weights are no longer version {origin}: tensor '{changed}' was written after "
                f"version {origin} "
                f"was captured, so version {target} cannot be reached from them. Capture after every update, write to "
                "weights only outside `with store.at(...)`, and load the weights of a captured version to go on"
            )
        return DigestMismatchError(
            f"the records from version {origin} to version {target} do not lead to its bits (tensor "
            f"'{name}'); a record "
            f"in memory or on disk is damaged. The weights are at version {origin} as before; "
            f"forget({target}) and drop "
            "or rescore its tokens"
        )

    def _enter(self, version: int) -> None:
        """Overwrite the weights with a full copy, whose digests were compared before."""
        weights, full_copy = self._weights, self._ledger.node(version).keyframe
        if version == self._copy_of() and self._shadow is not None:
            if self.config.verify == "full":
                self._ledger.demand(version, weights.digests(self._shadow), "the shadow copy's bits")
            shadow = self._shadow
            weights.overwrite(lambda index, task: weights.of(task, shadow))
            return
        assert full_copy is not None, f"version {version} has no full copy"
        keyframe = self._whole(full_copy)
        parts = weights.run(
            lambda index, task: weights.kernels.digest(task, weights.expand(keyframe, index, task))
        )
        self._ledger.demand(version, weights.per_tensor(parts), f"the bits of keyframe {version}")
        weights.overwrite(lambda index, task: weights.expand(keyframe, index, task))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not threading.current_thread().name.startswith(BACKGROUND):
            self.settle()
        if not self._lock.acquire(timeout=self.config.deadline_s):
            raise SnapshotBusyError(
                f"another thread has used the weights for {self.config.deadline_s} s (live version {self._live}); "
                "leave its `with store.at(...)` block first, or raise deadline_s"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _refuse_away(self, what: str) -> None:
        if self._away:
            raise SnapshotBusyError(
                f"{what} inside `with store.at(...)`: the weights are at version {self._live}"
            )
