"""How long a publication takes, and what share of the raw broadcast bandwidth it reaches.

    python tools/benchmark_weight_sync.py                       # a tiny model and a synthetic one of about 100 M
    python tools/benchmark_weight_sync.py --sizes tiny

For each model a server is started, its weights are published again and again over a process group, and between the
publications the same bytes are broadcast raw, between this process and another, by the same backend in buckets of
the same size. The bandwidth of a publication counts all of it: pause, update session, transfer, loading, cache
flush, version, resume. Rows go to docs/benchmarks/bridge.json.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint
from sglang_bridge import EngineServer, Publisher, PublishReport, ServerOptions
from tools.benchmark_rows import Row, write_rows

SHAPES = {
    "tiny": TinyShape(),
    "large": TinyShape(hidden=512, layers=8, heads=8, head_dim=64, experts=16, expert_hidden=512),
}
_PEER = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=1, world_size=2)
size = torch.zeros(1, dtype=torch.int64)
while True:
    dist.broadcast(size, 0)
    if size.item() == 0:
        break
    dist.broadcast(torch.empty(size.item(), dtype=torch.uint8), 0)
    dist.barrier()
dist.destroy_process_group()
"""


@contextlib.contextmanager
def raw_peer(folder: Path) -> Iterator[None]:
    """A second process in this one's default group, which receives what is broadcast."""
    store = folder / "store"
    peer = subprocess.Popen([sys.executable, "-c", _PEER, str(store)])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
    try:
        yield
        dist.broadcast(torch.zeros(1, dtype=torch.int64), 0)
        peer.wait(30)
    finally:
        peer.kill()
        dist.destroy_process_group()


def raw_seconds(total: int, bucket: int) -> float:
    """Time to broadcast ``total`` bytes in pieces of ``bucket``, each acknowledged by a barrier."""
    elapsed = 0.0
    while total > 0:
        size = min(total, bucket)
        data = torch.ones(size, dtype=torch.uint8)
        dist.broadcast(torch.tensor([size]), 0)
        started = time.perf_counter()
        dist.broadcast(data, 0)
        dist.barrier()
        elapsed += time.perf_counter() - started
        total -= size
    return elapsed


@dataclass(slots=True)
class Measured:
    """Publications and, between them, raw broadcasts of the same bytes."""

    reports: list[PublishReport]
    raw: list[float]

    @property
    def share(self) -> float:
        """Publishing bandwidth over raw bandwidth, whole publication."""
        return statistics.median(self.raw) / statistics.median(report.seconds for report in self.reports)

    @property
    def transfer_share(self) -> float:
        """The same for the transfer alone."""
        return statistics.median(self.raw) / statistics.median(report.transfer_seconds for report in self.reports)


def measure(name: str, rounds: int, bucket: int) -> Measured:
    """One model: start a server, publish, broadcast raw."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_tiny_checkpoint(checkpoint, 0, SHAPES[name])
        tensors = load_file(checkpoint / "model.safetensors")
        total = sum(tensor.nbytes for tensor in tensors.values())
        options = ServerOptions(dtype="float32", mem_fraction_static=0.1, max_total_tokens=16384)
        measured = Measured([], [])
        with EngineServer(checkpoint, log_path=Path(folder) / "server.log", options=options) as server, \
                raw_peer(Path(folder)), Publisher([server.url], backend="gloo", bucket_bytes=bucket) as publisher:
            publisher.connect()
            for version in range(-1, rounds):  # the first one warms up
                report = publisher.publish(version + 2, tensors.items())
                raw = raw_seconds(total, bucket)
                if version >= 0:
                    measured.reports.append(report)
                    measured.raw.append(raw)
    return measured


def rows(name: str, measured: Measured, rounds: int, bucket: int) -> list[Row]:
    """Figures of one model; the tiny one's carry the plain names."""
    suffix = "" if name == "tiny" else f"_{name}"
    shape, total = SHAPES[name], measured.reports[0].bytes
    conditions = (f"{name} Qwen3-MoE float32 ({total / 1e6:.1f} MB, {shape.layers} layers, {shape.experts} experts), "
                  f"one engine, gloo, buckets of {bucket / 2**20:.0f} MiB, median of {rounds}; transfer alone reaches "
                  f"{measured.transfer_share:.2f}; raw {total / 1e9 / statistics.median(measured.raw):.2f} GB/s")
    command = "python tools/benchmark_weight_sync.py"
    seconds = statistics.median(report.seconds for report in measured.reports)
    return [
        Row(f"publish_seconds{suffix}", round(seconds, 4), "s", "", conditions, command),
        Row(f"publish_bytes{suffix}", total, "bytes", "", conditions, command),
        Row(f"publish_bandwidth_share{suffix}", round(measured.share, 4), "", "", conditions, command),
    ]


def main() -> None:
    """Measure, print, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SHAPES), default=["tiny", "large"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.sizes:
        bucket = options.bucket_mib * 2**20
        measured = measure(name, options.rounds, bucket)
        found = rows(name, measured, options.rounds, bucket)
        for row in found:
            print(f"{row.figure:32s} {row.value} {row.unit}   {row.conditions}")
        write_rows("bridge", found)


if __name__ == "__main__":
    main()
