"""Two trainer ranks with a process group of their own; rank 0 publishes what the collective generator yields.

``python -m tests.live.trainer_ranks URL CHECKPOINT`` starts both and prints rank 0's report.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from sglang_bridge import Publisher


def export(path: str) -> Iterator[tuple[str, Tensor]]:
    """Half of each tensor lives on either rank; gathering it is a collective of both."""
    for name, tensor in sorted(load_file(f"{path}/model.safetensors").items()):
        half = torch.zeros_like(tensor)
        middle = len(tensor) // 2
        rows = slice(0, middle) if dist.get_rank() == 0 else slice(middle, None)
        half[rows] = tensor[rows]
        dist.all_reduce(half)
        yield name, half


def rank(index: int, url: str, path: str, rendezvous: str) -> None:
    """One trainer rank."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=index, world_size=2)
    if index == 0:
        with Publisher([url], bucket_bytes=100_000, deadline_s=30) as publisher:
            for version in (1, 2):
                report = publisher.publish(version, export(path), checksum=True)
        sys.stdout.write(f"{report.version} {report.verified} {report.buckets}\n")
    else:
        for _ in range(2):
            for _name, _tensor in export(path):
                pass
    dist.barrier()  # the trainer's own group still works
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, args=tuple(sys.argv[1:4]), nprocs=2)
