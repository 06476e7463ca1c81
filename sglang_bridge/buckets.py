"""Named tensors packed into flat byte buffers, in the layout SGLang unpacks ("flattened_bucket").

Invariants
- A bucket holds whole tensors, back to back, in the order they came. Each begins at an offset its element size
  divides (the engine views the bytes in place), so a tensor that would not is the first of a new bucket.
- At most one bucket is held at a time: the weights are streamed, never gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """``flat``: uint8 [bytes] on the device it is sent from; the rest describes the tensors inside, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.flat.numel()


def pack(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, device: torch.device) -> Iterator[Bucket]:
    """Buckets of at most ``bucket_bytes`` (a single larger tensor makes a larger bucket), on ``device``."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if tensor.numel() == 0:
            raise ValueError(f"tensor {name} with shape {list(tensor.shape)} is empty; nothing can be published")
        if held and (size + tensor.nbytes > bucket_bytes or size % tensor.element_size()):
            yield _bucket(held, device)
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield _bucket(held, device)


def _bucket(held: list[tuple[str, Tensor]], device: torch.device) -> Bucket:
    parts = [tensor.detach().to(device).contiguous().view(-1).view(torch.uint8) for _, tensor in held]
    return Bucket(
        names=[name for name, _ in held],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in held],
        shapes=[list(tensor.shape) for _, tensor in held],
        flat=torch.cat(parts),
    )
