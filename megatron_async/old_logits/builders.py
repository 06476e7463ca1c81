"""From the configuration to a source: the one table of what is built in."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_async.config.schema import RunConfig
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles
from megatron_async.old_logits.averaged import AveragedSource
from megatron_async.old_logits.dedicated import DedicatedSource, Fetch
from megatron_async.old_logits.ewma import ActiveFractionReset, WeightAverage, beta_of_window
from megatron_async.old_logits.interrupt import InterruptSource
from megatron_async.old_logits.reference import WithReference, reference_weights
from megatron_async.old_logits.snapshot import SnapshotSource
from megatron_async.old_logits.source import OldLogitSource, RolloutSource, StartSource
from megatron_async.peers import PeerLink
from megatron_async.snapshots import FullCopyStore, SnapshotConfig, SnapshotStore, WeightHistory

COPIES_BEYOND_WINDOW = 3
"""Full copies kept besides those of `max_staleness` versions: the live one, the one being made, one to spare."""


@dataclass(frozen=True, slots=True)
class _Request:
    """What a source is built from. version: that of the policy's present weights."""

    config: RunConfig
    policy: Policy
    needs: frozenset[str]
    version: int
    fetch: Fetch

    @property
    def statistics(self) -> bool:
        """The objective needs log-probs of the starting weights for the whole batch, before its loss."""
        return "batch_statistics" in self.needs

    @property
    def reuses_training_forward(self) -> bool:
        """With one update per batch, the training forward computes what a scoring pass of these weights would."""
        config = self.config
        return config.old_logits.reuse_training_forward and config.trainer.updates_per_batch == 1


def _start(request: _Request) -> OldLogitSource:
    return StartSource(request.policy, request.statistics or not request.reuses_training_forward)


def _rollout(request: _Request) -> OldLogitSource:
    return RolloutSource(request.policy, request.statistics)


def _snapshot(request: _Request) -> OldLogitSource:
    folder = disk_folder(request.config)
    return _over(request, open_history(request.config, request.policy, request.version, folder))


def _snapshot_full(request: _Request) -> OldLogitSource:
    folder = disk_folder(request.config)
    return _over(request, open_full_copies(request.config, request.policy, request.version, folder))


def _over(request: _Request, history: WeightHistory) -> SnapshotSource:
    return SnapshotSource(
        request.policy,
        history,
        with_start=request.statistics,
        reuse_training_forward=request.reuses_training_forward,
        background=request.config.snapshots.background,
        eager=request.config.snapshots.eager,
    )


def _ewma(request: _Request) -> OldLogitSource:
    options = request.config.objective.options
    window, beta = options.get("staleness_window"), options.get("beta")
    rule = ActiveFractionReset(float(options["reset_threshold"]), int(options["reset_patience"]))
    decay = float(beta) if beta is not None else beta_of_window(float(window or 0.0))
    average = WeightAverage(request.policy.masters(), decay, rule)
    return AveragedSource(request.policy, average, request.statistics)


def _dedicated(request: _Request) -> OldLogitSource:
    config, rank = request.config, dist.get_rank()
    folder = history_folder(config)
    link = PeerLink.listen(peer_file(config, rank), config.trainer.deadline_s)
    link.send_weights(request.version, (tensor for _, tensor in request.policy.named_parameters()))
    return DedicatedSource(
        request.policy,
        open_history(config, request.policy, request.version, folder),
        folder,
        link,
        request.fetch,
        with_start=request.statistics,
        reuse_training_forward=request.reuses_training_forward,
    )


def _interrupt(request: _Request) -> OldLogitSource:
    source = InterruptSource(
        request.policy,
        with_start=request.statistics,
        reuse_training_forward=request.reuses_training_forward,
        eager=request.config.snapshots.eager,
    )
    source.restore(request.version, {})
    return source


BUILDERS: dict[str, Callable[[_Request], OldLogitSource]] = {
    "start": _start,
    "rollout": _rollout,
    "linear": _rollout,
    "loglinear": _rollout,
    "snapshot": _snapshot,
    "snapshot_full": _snapshot_full,
    "ewma": _ewma,
    "interrupt": _interrupt,
    "dedicated": _dedicated,
}
"""Values of `old_logits.source` that are built in."""


def _no_scores(ids: SequenceOf[str]) -> dict[str, np.ndarray]:
    raise UserError(f"no dedicated model scores these {len(ids)} trajectories")


def build_source(
    config: RunConfig, policy: Policy, needs: frozenset[str], version: int = 0, fetch: Fetch = _no_scores
) -> OldLogitSource:
    """The source named in `old_logits.source`, with a reference policy where the objective needs one.

    Args:
        needs: what the objective needs (`Objective.needs`).
        version: the version of the policy's present weights.
        fetch: scores of a dedicated model, read by the source `dedicated`.

    Raises:
        UserError: a source that is not built in.
        SnapshotError: the history in the run's folder does not know the present weights under this version.
    """
    source = config.old_logits.source
    if source not in BUILDERS:
        raise UserError(f"old_logits.source={source!r} is not built in yet; choose one of {sorted(BUILDERS)}")
    built = BUILDERS[source](_Request(config, policy, needs, version, fetch))
    if "reference" not in needs:
        return built
    return WithReference(policy, built, reference_weights(policy, is_reference=version == 0))


def history_folder(config: RunConfig) -> Path:
    """Where this trainer rank keeps its history."""
    return RunFiles(config.run_path).snapshots / f"rank_{dist.get_rank():04d}"


def disk_folder(config: RunConfig) -> Path | None:
    """`history_folder`, or None where the history may not use the disk."""
    return None if config.snapshots.disk_bytes == 0 else history_folder(config)


def peer_file(config: RunConfig, rank: int) -> Path:
    """Where a trainer rank leaves the port that its scorer rank calls."""
    return RunFiles(config.run_path).root / "scorer" / f"rank_{rank:04d}.json"


def open_history(config: RunConfig, policy: Policy, version: int, folder: Path | None) -> SnapshotStore:
    """The history of this rank's weights as differences; folder: on disk, or None to keep it in memory.

    Without a shadow copy it sees every update of the policy from now on, before the update is in the weights.
    """
    options, tensors = config.snapshots, dict(policy.named_parameters())
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    # A dedicated model makes no updates of its own: it takes those that arrive, and compares.
    follows = policy.optimizer is None
    shadow = follows or (not policy.has_masters if options.shadow is None else options.shadow)
    settings = SnapshotConfig(
        host_bytes=nbytes if options.host_bytes is None else options.host_bytes,
        device_bytes=options.device_bytes,
        disk_bytes=options.disk_bytes,
        durable=options.durable,
        shadow=shadow,
        threads=options.threads,
        keyframe_every=options.keyframe_every,
        verify=options.verify,
        compression_level=options.compression_level,
        pin_memory=platform.setup().is_gpu,
        deadline_s=config.trainer.deadline_s,
    )
    store = SnapshotStore(tensors, version=version, config=settings, directory=folder)
    if not settings.shadow:
        policy.observe_updates(store.stage_update)
    return store


def open_full_copies(
    config: RunConfig, policy: Policy, version: int, folder: Path | None
) -> FullCopyStore:
    """The history of this rank's weights as full copies; folder: on disk too, or None to keep it in memory."""
    options, tensors = config.snapshots, dict(policy.named_parameters())
    # A copy rounds every tensor up to the arena's grain.
    copy = sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors.values())
    copies = config.rollout.max_staleness + COPIES_BEYOND_WINDOW
    settings = SnapshotConfig(
        host_bytes=copies * copy if options.host_bytes is None else options.host_bytes,
        disk_bytes=options.disk_bytes,
        durable=options.durable,
        threads=options.threads,
        verify=options.verify,
        pin_memory=platform.setup().is_gpu,
        deadline_s=config.trainer.deadline_s,
    )
    return FullCopyStore(tensors, version=version, config=settings, directory=folder)
