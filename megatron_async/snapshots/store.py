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
- `shadow=False`: call `stage_update(tensors)` *before* the new bits are written, with the new tensors one by one (for
  instance the masters, cast), and `capture(version)` when they are to be a version. The record is encoded against the
  live weights, which are then stepped along it: no copy. `capture_update` does both at once.

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
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from megatron_async.snapshots.codec import changed_share
from megatron_async.snapshots.errors import (
    DigestMismatchError,
    SnapshotBusyError,
    SnapshotError,
)
from megatron_async.snapshots.history import CaptureReport
from megatron_async.snapshots.ledger import Ledger, Node
from megatron_async.snapshots.replicas import ReplicaGroup, owners_of
from megatron_async.snapshots.settings import SnapshotConfig
from megatron_async.snapshots.stream import Encode, Step, encode_step, encode_stream
from megatron_async.snapshots.tiers import Record, Tiers, memory_tiers
from megatron_async.snapshots.travel import Traveller
from megatron_async.snapshots.walker import version_digest

BACKGROUND = "snapshot-capture"
"""Name of the thread that captures in the background."""


class SnapshotStore(Traveller):
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
        super().__init__(tensors, version, config, directory, kind="")
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
        self._background = ThreadPoolExecutor(1, BACKGROUND)
        self._pending: Future[CaptureReport] | None = None
        self._home = version
        self._staged: Step | None = None
        self._stagings = 0
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
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.builder.discard()
        if self._directory is not None:
            self._directory.close()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def versions(self) -> list[int]:
        """Versions that can be restored from where the live weights are."""
        with self._turn():
            ledger, copy = self._ledger, self._copy_of()
            return sorted(v for v in ledger.nodes if ledger.plan(self._live, v, copy) is not None)

    def check(self, version: int) -> None:
        """Raises UnknownVersionError or DamagedRecordError for a version that cannot be restored; nothing moves."""
        with self._turn():
            self._ledger.demand_plan(self._live, version, self._copy_of())

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
            SnapshotError: the number was used, the parent is not the live version, or there is neither a shadow nor a
                staged update.
        """
        with self._turn():
            self._check_capture(version, parent)
            self._ledger.collect(self._live)
            shadow, weights, step = self._shadow, self._weights, self._staged
            if shadow is None:
                if step is None:
                    raise SnapshotError(
                        f"capture({version}): the store has no shadow copy to compare with and no update was staged; "
                        "call stage_update() before the weights are written, or set shadow=True"
                    )
                return self._commit(version, step)
            step = self._encode(
                f"version {version}",
                self._path_of(version),
                lambda encode: weights.run(
                    lambda i, task: encode(i, weights.of(task, shadow), weights.of(task))
                ),
            )
            try:
                return self._commit(version, step, shadow)
            except BaseException:
                self._discard(step)
                raise

    def stage_update(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the live tensors to new bits, and remember the step until `capture` gives it a number.

        May be called several times before: the step then leads from the version to the newest bits.

        Args:
            tensors: every tensor's new value, by name, in any order; each may be freed once the next is asked for.

        Raises:
            TensorSetError: a tensor is missing, unknown, given twice or of another shape or dtype.
            BudgetExceededError: no room for the record.
            SnapshotBusyError: called inside `at`.
            SnapshotError: the store has a shadow.
            The live weights are as they were before the call.
        """
        with self._turn():
            self._stage(tensors)

    def capture_update(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], parent: int | None = None
    ) -> CaptureReport:
        """`stage_update` and `capture` in one: all or nothing.

        Raises:
            As both. The live weights are as they were before the call.
        """
        with self._turn():
            self._check_capture(version, parent)
            self._ledger.collect(self._live)
            step = self._stage(tensors)
            try:
                return self._commit(version, step)
            except BaseException:
                self._weights.walk([self._whole(step.record)], with_digest=False)
                self._staged = None
                self._discard(step)
                raise

    def _discard(self, step: Step) -> None:
        """Free a record that is no version; a file that the manifest may name stays."""
        step.builder.discard(keep_file=self._directory is not None and self._directory.behind)

    def _stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Step:
        self._refuse_away("stage_update()")
        self._weights.check_memory()
        if self._shadow is not None:
            raise SnapshotError("the store compares with its shadow copy: write the weights, then capture()")
        self._stagings += 1
        path = self._directory.staged_path(self._stagings) if self._directory is not None else None
        weights, before = self._weights, self._staged

        def start_of(index: int) -> torch.Tensor:
            """The task's words in the live version."""
            return (
                weights.of(weights.grid[index]) if before is None else weights.stepped(index, before.record)
            )

        step = self._encode(
            f"the update of version {self._live}",
            path,
            lambda encode: encode_stream(weights, tensors, lambda i, new: encode(i, start_of(i), new)),
        )
        try:
            back = [] if before is None else [self._whole(before.record)]
            weights.walk([*back, self._whole(step.record)], with_digest=False)
        except BaseException:
            step.builder.discard()
            raise
        if before is not None:
            before.builder.discard()
        self._staged = step
        return step

    def _encode(
        self, label: str, path: Path | None, fill: Callable[[Encode], list[int | torch.Tensor]]
    ) -> Step:
        return encode_step(self._weights, self._tiers.begin(label, path), self._owned, fill)

    def _commit(self, version: int, step: Step, shadow: list[torch.Tensor] | None = None) -> CaptureReport:
        """Make the step's end a version; on an error it is none, and the step is as it was."""
        began, record, path = time.perf_counter(), step.record, self._path_of(version)
        try:
            if path is not None and record.file is not None and record.file.path != path:
                record.file.rename(path)
            elif path is not None and record.file is None and self.config.durable:
                self._tiers.write(record, path)
            durable = time.perf_counter() - began
            record.label = f"version {version}"
            self._ledger.add(version, Node(self._live, step.digests, record), path)
            if record.file is not None:
                self._ledger.publish(version)
            if shadow is not None:
                self._weights.walk([record], with_digest=False, words=shadow)
        except BaseException:
            self._ledger.withdraw(version)
            raise
        parent, self._live, self._home, self._staged = self._live, version, version, None
        seconds = step.seconds + time.perf_counter() - began - durable
        self._maybe_keyframe(version)
        tier = "disk" if record.tier is None else record.tier.name
        changed = changed_share(self._weights.grid, record.segments)
        return CaptureReport(version, parent, record.nbytes, changed, tier, seconds, durable)

    def _path_of(self, version: int) -> Path | None:
        return self._directory.record_path(version) if self._directory is not None else None

    def _check_capture(self, version: int, parent: int | None) -> None:
        self._check_new(version, parent, is_known=version in self._ledger.nodes)
        self._weights.check_memory()

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
            self._refuse_staged("keyframe()")
            version, weights = self._live, self._weights
            node = self._ledger.node(version)
            if node.keyframe is not None:
                return
            path = self._directory.keyframe_path(version) if self._directory is not None else None
            builder = self._tiers.begin(f"keyframe {version}", path)
            if path is not None:
                builder.disk_only()
            nothing = torch.zeros_like
            step = encode_step(
                weights,
                builder,
                self._owned,
                lambda e: weights.run(lambda i, task: e(i, nothing(weights.of(task)), weights.of(task))),
            )
            try:
                self._ledger.demand(version, step.digests, "the live weights")
                node.keyframe = step.record
                self._ledger.publish(version)
            except BaseException:
                node.keyframe = None
                builder.discard()
                raise
            self._tiers.adopt(node.keyframe, path)
            self._captures_since_keyframe = 0

    # ---- travel --------------------------------------------------------------------------------------------------

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
        self._refuse_staged(f"version {target} cannot be restored")
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
                raise ledger.blame(origin, target, name, self._weights.digests())
            self._enter(steps[0].to)
            self._live, steps = steps[0].to, steps[1:]
        records = [self._whole(ledger.record(step)) for step in steps]
        digests = self._weights.walk(records, with_digest=with_digest)
        name = None if digests is None else ledger.compare(target, digests)
        wrong = name is not None if self._replicas is None else self._replicas.any(name is not None)
        if wrong:
            self._weights.walk(records[::-1], with_digest=False)
            raise ledger.blame(self._live, target, name or "of another rank", self._weights.digests())
        self._live = target
        return len(records)

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

    def _before_turn(self) -> None:
        if not threading.current_thread().name.startswith(BACKGROUND):
            self.settle()

    def _refuse_staged(self, what: str) -> None:
        if self._staged is not None:
            raise SnapshotBusyError(
                f"{what}: the weights hold an update of version {self._live} that is no version yet; capture() it first"
            )
