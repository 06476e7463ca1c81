"""Processes for the kill tests: `work` captures and `score_for_ever` scores until it is killed.

Weights follow from the version number alone, so that the test can make every version again. A version is sent only
after its capture returned: what was sent, the store has promised.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from megatron_async.engine.sequences import Sequence
from megatron_async.old_logits.snapshot import SnapshotSource
from megatron_async.snapshots import SnapshotConfig, SnapshotStore

SIZES = {"embedding": 150_000, "layer": 40_000}
KEEP = 6


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """The weights of a version: a start, and a few flipped low bits for every version up to it."""
    tensors = {name: torch.arange(size, dtype=torch.int32).to(torch.int16) for name, size in SIZES.items()}
    for step in range(1, version + 1):
        advance(tensors, step)
    return {name: words.view(torch.bfloat16) for name, words in tensors.items()}


def advance(tensors: dict[str, torch.Tensor], step: int) -> None:
    """The update that makes version `step` of the version before."""
    random = np.random.default_rng(step)
    for words in tensors.values():
        chosen = torch.from_numpy(random.integers(0, words.numel(), words.numel() // 30))
        words.view(torch.int16)[chosen] ^= 1 + step % 7


def work(folder: Path, host_bytes: int, promises: Connection) -> None:
    """Open at the newest version there, capture and travel for ever."""
    version = max((int(path.stem.split("-")[1]) for path in folder.glob("digests-*.bin")), default=0)
    tensors = weights_of(version)
    config = SnapshotConfig(host_bytes=host_bytes, keep_last=KEEP, keyframe_every=4)
    store = SnapshotStore(tensors, version=version, config=config, directory=folder)
    store.set_needed([])
    while True:
        version += 1
        advance(tensors, version)
        store.capture(version)
        promises.send(version)
        with store.journey() as journey:
            for back in range(version - 1, max(-1, version - KEEP), -1):
                journey.go(back)


class BitsPolicy:
    """A policy whose every log-prob is a number that follows from all bits of its weights."""

    def __init__(self, tensors: dict[str, torch.Tensor], scored: Connection | None = None) -> None:
        self.tensors = tensors
        self._scored = scored

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()

    def logprobs(self, sequences: list[Sequence]) -> list[np.ndarray]:
        value = logprob_under(self.tensors)
        if self._scored is not None:
            self._scored.send(value)
        return [np.full(len(sequence), value, np.float32) for sequence in sequences]


def logprob_under(tensors: dict[str, torch.Tensor]) -> float:
    """Log-prob that a `BitsPolicy` with these weights gives every token."""
    checksum = 0
    for tensor in tensors.values():
        checksum = zlib.crc32(tensor.view(torch.uint8).numpy().tobytes(), checksum)
    return float(np.float32(-checksum / 2**32))


def batch_of(versions: range, current: int) -> list[Sequence]:
    """Two trajectories over all versions, token t of the first sampled by the t-th."""
    held = np.array(list(versions))
    return [
        Sequence(
            np.arange(len(held), dtype=np.int32),
            arrays={
                "action_mask": np.ones(len(held), bool),
                "version_gap": current - order,
                "kv_mismatch": np.zeros(len(held), bool),
            },
        )
        for order in (held, held[::-1].copy())
    ]


def source_over(folder: Path, version: int, scored: Connection | None = None) -> SnapshotSource:
    """A source whose history in `folder` is opened with the weights of a version, as after a resume."""
    tensors = weights_of(version)
    config = SnapshotConfig(host_bytes=0, keep_last=KEEP)
    store = SnapshotStore(tensors, version=version, config=config, directory=folder)
    policy = BitsPolicy(tensors, scored)
    return SnapshotSource(policy, store, with_start=False, reuse_training_forward=False)  # type: ignore[arg-type]


def score_for_ever(folder: Path, version: int, scored: Connection) -> None:
    """Score the same batch over all versions up to this one again and again; sends what each forward saw."""
    source = source_over(folder, version, scored)
    while True:
        source.score(batch_of(range(version + 1), version), ["a", "b"])
