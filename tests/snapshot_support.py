"""Weights that change like trained ones, for the snapshot tests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from megatron_async.snapshots import SnapshotError, SnapshotStore

Bits = dict[str, torch.Tensor]


def bits(tensors: Mapping[str, torch.Tensor]) -> Bits:
    """A copy of all bits, as bytes: NaN payloads and signed zeros count."""
    return {name: tensor.detach().reshape(-1).view(torch.uint8).clone() for name, tensor in tensors.items()}


def same(tensors: Mapping[str, torch.Tensor], wanted: Bits) -> bool:
    """Whether every bit is the wanted one."""
    now = bits(tensors)
    return now.keys() == wanted.keys() and all(torch.equal(now[name], wanted[name]) for name in wanted)


def mixed_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """One tensor of every kind that matters: dtypes, sizes around the chunk's, empty, scalar, all patterns of bits."""
    random = torch.Generator().manual_seed(seed)

    def patterns(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=random).view(
            dtype
        )

    return {
        "embedding": patterns(200_000, torch.bfloat16).reshape(400, 500),
        "chunk": patterns(65_536, torch.bfloat16),
        "router": patterns(65_537, torch.float32),
        "half": patterns(1_001, torch.float16),
        "fp8": patterns(70_000, torch.float8_e4m3fn),
        "double": patterns(33, torch.float64),
        "steps": patterns(5, torch.int64),
        "scalar": patterns(1, torch.bfloat16).reshape(()),
        "empty": torch.zeros(0, 7, dtype=torch.bfloat16),
    }


def toggle(tensors: Mapping[str, torch.Tensor], share: float, seed: int, highest_bit: int = 8) -> None:
    """Flip bits below `highest_bit` in a random share of every tensor's bytes-wide patterns, in place."""
    random = np.random.default_rng(seed)
    for tensor in tensors.values():
        octets = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        chosen = random.random(octets.size) < share
        octets[chosen] ^= random.integers(1, 1 << highest_bit, int(chosen.sum())).astype(np.uint8)


def refusal(store: SnapshotStore, version: int) -> SnapshotError | None:
    """Capture a version; the error when it was refused, None when not."""
    try:
        store.capture(version)
    except SnapshotError as error:
        return error
    return None


class Adam:
    """bf16 weights under Adam with fp32 masters and random gradients, as in mixed-precision training."""

    def __init__(self, sizes: Mapping[str, int], lr: float, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        masters = {name: torch.randn(size, generator=self._random) * 0.02 for name, size in sizes.items()}
        self.masters = masters
        self.optimizer = torch.optim.Adam(list(masters.values()), lr=lr, betas=(0.9, 0.98), eps=1e-8)
        self.tensors = {name: master.to(torch.bfloat16) for name, master in masters.items()}

    def step(self) -> None:
        """Update the masters only."""
        for master in self.masters.values():
            master.grad = torch.randn(master.shape, generator=self._random) * 1e-3
        self.optimizer.step()

    def publish(self) -> None:
        """Cast the masters into the live weights."""
        for name, master in self.masters.items():
            self.tensors[name].copy_(master)
