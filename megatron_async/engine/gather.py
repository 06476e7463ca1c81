"""Small values of every rank on every rank. JSON: what comes from another process is never unpickled.

Invariant: collective over all ranks; the default group always has a backend for host memory.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def all_gather_json(value: Any) -> list[Any]:
    """`value` of each rank, in the order of ranks. JSON turns tuples into lists; floats keep their bits, NaN too."""
    body = json.dumps(value).encode()
    length = torch.tensor([len(body)], dtype=torch.int64)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    longest = max(int(one) for one in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    bodies = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(bodies, padded)  # of equal lengths: gloo takes no others
    return [
        json.loads(one.numpy()[: int(size)].tobytes()) for one, size in zip(bodies, lengths, strict=True)
    ]
