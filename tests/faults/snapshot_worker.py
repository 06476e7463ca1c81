"""A process for the kill tests: `work` captures until it is killed.

Weights follow from the version number alone, so that the test can make every version again. A version is sent only
after its capture returned: what was sent, the store has promised.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

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
