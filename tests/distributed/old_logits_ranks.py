"""Runs on every rank: real optimiser steps under one layout, and every way of going back to the versions they made.

usage: old_logits_ranks.py DIRECTORY CASE…   with CASE like moe:tp2:bf16:distributed
DIRECTORY holds, for each kind of model, a checkpoint in KIND/model; findings.json goes there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_async.config.schema import ModelConfig, TrainerConfig
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.old_logits.averaged import AveragedSource
from megatron_async.old_logits.ewma import WeightAverage
from megatron_async.old_logits.shards import version_shards
from megatron_async.old_logits.snapshot import SnapshotSource
from megatron_async.snapshots import FullCopyStore, SnapshotConfig, SnapshotStore, WeightHistory
from tests.distributed.engine_ranks import parse_layout
from tests.old_logits_batches import LENGTHS, OPTIMIZER, policy_gradient, versioned_sequences

VERSIONS = int(os.environ.get("OLD_LOGITS_VERSIONS", "5"))
IDS = [f"t{i}" for i in range(len(LENGTHS))]
Bits = dict[str, str]
LogProbs = list[np.ndarray]


def bits(policy: Policy) -> Bits:
    """A digest of every parameter's bits on this rank, by an independent hash."""
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in policy.named_parameters()
    }


class Run:
    """A policy that makes `VERSIONS` updates; both histories and the average follow it."""

    def __init__(self, directory: Path, case: str) -> None:
        kind_and_layout = ":".join(p for p in case.split(":") if p not in ("bf16", "fp32", "distributed"))
        kind, layout = parse_layout(kind_and_layout, world())
        dtype = "bfloat16" if "bf16" in case.split(":") else "float32"
        trainer = TrainerConfig(
            use_distributed_optimizer="distributed" in case.split(":"), micro_batch_tokens=64
        )
        model = ModelConfig(path=str(directory / kind / "model"), dtype=dtype)
        self.policy = Policy.build(model, layout, trainer, OPTIMIZER)
        self.tensors = dict(self.policy.named_parameters())
        self.nbytes = sum(tensor.nbytes + 64 for tensor in self.tensors.values())
        self.folder = directory / "history" / case.replace(":", "_") / f"rank_{dist.get_rank()}"
        self.batch = versioned_sequences(range(VERSIONS + 1), current=VERSIONS)
        self.seen: list[Bits] = []
        self.current_logprobs: dict[int, LogProbs] = {}

    def histories(self) -> tuple[SnapshotStore, FullCopyStore]:
        """Differences, without a shadow copy wherever masters step before the weights do; and full copies."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shadow = not self.policy.has_masters
        # A few versions spill to disk; thousands of walks among fifty would mostly decompress, so memory holds those.
        room = self.nbytes * (1 if VERSIONS < 10 else VERSIONS)
        settings = SnapshotConfig(host_bytes=room, keep_last=VERSIONS + 1, shadow=shadow)
        copies = SnapshotConfig(host_bytes=(VERSIONS + 2) * self.nbytes, keep_last=VERSIONS + 1)
        store = SnapshotStore(self.tensors, version=0, config=settings, directory=self.folder)
        if not shadow:
            self.policy.observe_updates(store.stage_update)
        return store, FullCopyStore(self.tensors, version=0, config=copies)

    def note(self, version: int) -> None:
        """What this version's weights are, and what they give for the shard that will be asked of it."""
        self.seen.append(bits(self.policy))
        versions = [
            np.where(s.arrays["action_mask"], VERSIONS - s.arrays["version_gap"], -1) for s in self.batch
        ]
        shards = version_shards(versions, [s.arrays["action_mask"] for s in self.batch])
        for shard in shards:
            if shard.version == version:
                self.current_logprobs[version] = self.policy.logprobs(shard.cut(self.batch))

    def step(self, seed: int) -> None:
        sequences = versioned_sequences(range(1), current=0, seed=seed)
        result = self.policy.train_step(sequences, policy_gradient(sequences))
        assert result.skipped is None, result.skipped


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def every_pair(history: WeightHistory, seen: list[Bits], policy: Policy) -> list[str]:
    """Pairs (from, to) whose walk did not give the bits that `to` had when it was current; and the way home."""
    wrong = []
    home = history.live_version
    for origin in range(len(seen)):
        for target in range(len(seen)):
            with history.journey() as journey:
                journey.go(origin)
                journey.go(target)
                if bits(policy) != seen[target]:
                    wrong.append(f"{origin}->{target}")
            if bits(policy) != seen[home]:
                wrong.append(f"{origin}->{target}->home")
    return wrong


def differing(found: LogProbs, expected: dict[int, LogProbs], batch: list[Sequence]) -> int:
    """Action tokens whose recovered log-prob is not, bit for bit, the one computed while their version was current."""
    count = 0
    versions = [np.where(s.arrays["action_mask"], VERSIONS - s.arrays["version_gap"], -1) for s in batch]
    for shard in version_shards(versions, [s.arrays["action_mask"] for s in batch]):
        for k, (i, tokens) in enumerate(zip(shard.members, shard.tokens, strict=True)):
            then = expected[shard.version][k][tokens]
            count += int((found[i][tokens].view(np.uint32) != then.view(np.uint32)).sum())
    return count


def inspect(directory: Path, case: str) -> dict[str, Any]:
    run = Run(directory, case)
    policy = run.policy
    store, copies = run.histories()
    source = SnapshotSource(policy, store, with_start=False, reuse_training_forward=False)
    full = SnapshotSource(policy, copies, with_start=False, reuse_training_forward=False)
    reusing = SnapshotSource(policy, store, with_start=False, reuse_training_forward=True)
    average = WeightAverage(policy.masters(), beta=0.6)
    history = [[master.double().clone() for master in policy.masters()]]
    averaged = AveragedSource(policy, average, with_start=False)
    run.note(0)
    for version in range(1, VERSIONS + 1):
        run.step(seed=version)
        for part in (source, full, averaged):
            part.updated(version, oldest_needed=0)
        history.append([master.double().clone() for master in policy.masters()])
        source.settle()
        run.note(version)
    exact, by_copies, reused = (part.score(run.batch, IDS) for part in (source, full, reusing))
    proxy = averaged.score(run.batch, IDS)
    after = bits(policy)
    found = {
        "versions": store.versions(),
        "wrong_pairs": every_pair(store, run.seen, policy) + every_pair(copies, run.seen, policy),
        "differing_logprobs": differing(exact.values, run.current_logprobs, run.batch),
        "differing_by_copies": differing(by_copies.values, run.current_logprobs, run.batch),
        "reused_are_missing_only_at_gap_0": reused_matches(reused, exact, run.batch),
        "weights_unchanged": after == run.seen[-1],
        "moved": sum(a != b for a, b in zip(run.seen[0].values(), run.seen[-1].values(), strict=True)),
        "average_error": average_error(average, history),
        "proxy_error": proxy_error(run, average, proxy.values),
        "weights_after_proxy": bits(policy) == run.seen[-1],
        "metrics": exact.metrics,
        "exact_tokens": sum(int(flags.sum()) for flags in exact.exact),
        "kept_memory": store.usage(),
        "has_masters": policy.has_masters,
    }
    store.close()
    found["reopened"] = reopened(run)
    return found


def reused_matches(reused: Any, exact: Any, batch: list[Sequence]) -> bool:
    """Tokens of the live version are left to the training forward, all others are scored alike."""
    for values, current, reference, sequence in zip(
        reused.values, reused.is_current, exact.values, batch, strict=True
    ):
        at_gap_0 = sequence.arrays["action_mask"] & (sequence.arrays["version_gap"] == 0)
        older = sequence.arrays["action_mask"] & ~at_gap_0
        if not (current == at_gap_0).all() or not np.isnan(values[~older]).all():
            return False
        if (values[older] != reference[older]).any():
            return False
    return True


def average_error(average: WeightAverage, history: list[list[torch.Tensor]]) -> float:
    """Against the closed form Σ β^(t-k) θ(k) / Σ β^(t-k) in float64."""
    factors = [average.beta ** (len(history) - 1 - k) for k in range(len(history))]
    worst = 0.0
    for i, value in enumerate(average.values):
        closed = sum(f * masters[i] for f, masters in zip(factors, history, strict=True)) / sum(factors)
        worst = max(worst, float((value.double() - closed).abs().max()) if value.numel() else 0.0)
    return worst


def proxy_error(run: Run, average: WeightAverage, values: LogProbs) -> float:
    """Against log-probs under masters that were set to the average by hand."""
    policy, kept = run.policy, [master.detach().clone() for master in run.policy.masters()]
    policy.exchange_masters([value.clone() for value in average.values])
    by_hand = policy.logprobs(run.batch)
    policy.exchange_masters(kept)
    return max(float(np.abs(a - b).max()) for a, b in zip(values, by_hand, strict=True))


def reopened(run: Run) -> bool:
    """A new store over the same folder restores every version, as after a crash."""
    settings = SnapshotConfig(host_bytes=run.nbytes, keep_last=VERSIONS + 1)
    with SnapshotStore(run.tensors, version=VERSIONS, config=settings, directory=run.folder) as store:
        for version, expected in enumerate(run.seen):
            with store.at(version):
                if bits(run.policy) != expected:
                    return False
    return bits(run.policy) == run.seen[-1]


def main() -> None:
    directory = Path(sys.argv[1])
    findings = {}
    for case in sys.argv[2:]:
        found = inspect(directory, case)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        findings[case] = everywhere
    if dist.get_rank() == 0:
        (directory / "findings.json").write_text(json.dumps(findings, indent=1))
    platform.shutdown()


if __name__ == "__main__":
    main()
