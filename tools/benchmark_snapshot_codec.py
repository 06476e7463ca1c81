"""What a history of weights costs: captures and restores against memory copies, memory against full copies.

    python -m tools.benchmark_snapshot_codec [--parameters 128e6] [--threads 1] [--device cpu] [--parts density,1e-6]

The weights are layers of Qwen3-30B-A3B as one of eight expert-parallel ranks holds them (random numbers), in bf16, and
everything goes through the store's public calls:

1. `density`: a share of the weights moves by one unit in the last place; `capture` and a one-step `journey.go` are
   timed against a plain copy of the weights, taken in turns in the same run.
2. A learning rate: fp32 masters under torch.optim.Adam (the optimiser that Megatron takes where it has no fused one)
   with random gradients, published as bf16 for some versions; memory of the records, and growth of the process, against
   as many full copies; and the switch to the version before and back against `FullCopyStore`, each with and without
   digests.

On another device the plain copies and the full copies go to page-locked host memory, as trainers keep them there, and
records stay in device memory while it is given to them.

Every timing is the best of several rounds, on both sides; on the host with one thread it is CPU time, which other
processes on the machine do not lengthen. Rows go to docs/benchmarks/snapshot.json, those of another
device to snapshot_device.json.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron_async.snapshots import FullCopyStore, SnapshotConfig, SnapshotStore
from tools.benchmark_rows import Row, write_rows

DENSITIES = (0.005, 0.02, 0.09, 0.5)
RATES = (1e-6, 1e-5, 1e-4)
ROUNDS = 5
HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM, EXPERTS, EXPERT_HIDDEN = 2048, 32, 4, 128, 128, 768
EXPERTS_ON_RANK = EXPERTS // 8
HOST_GOALS = {"capture": ">= 0.3", "restore": ">= 1.2", "restore_sparse": ">= 3", "switch": "<= 0.75"}
DEVICE_GOALS = {"capture": ">= 0.8", "restore": ">= 0.8", "restore_sparse": "", "switch": "<= 0.1"}


@dataclass(frozen=True, slots=True)
class Options:
    parameters: int
    threads: int
    versions: int
    device: str

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"

    @property
    def goals(self) -> dict[str, str]:
        return HOST_GOALS if self.on_host else DEVICE_GOALS

    @property
    def counts_cpu(self) -> bool:
        """Whether one thread does everything, so that its CPU time is the time."""
        return self.on_host and self.threads == 1

    def clock(self) -> float:
        """Seconds, see `time_text`."""
        return time.process_time() if self.counts_cpu else time.perf_counter()

    @property
    def time_text(self) -> str:
        """For the conditions of a row."""
        return "CPU time of one thread" if self.counts_cpu else f"wall time, {self.threads} threads"

    def random(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)


def shapes(parameters: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of whole tensors until there are that many weights, layer by layer."""
    left, layer = parameters, 0
    while left > 0:
        prefix = f"layers.{layer}"
        heads = (HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM
        rows: list[tuple[str, tuple[int, ...]]] = [
            ("input_norm", (HIDDEN,)),
            ("qkv", (heads, HIDDEN)),
            ("q_norm", (HEAD_DIM,)),
            ("k_norm", (HEAD_DIM,)),
            ("out", (HIDDEN, HEADS * HEAD_DIM)),
            ("router", (EXPERTS, HIDDEN)),
        ]
        for expert in range(EXPERTS_ON_RANK):
            rows.append((f"experts.{expert}.gate_up", (2 * EXPERT_HIDDEN, HIDDEN)))
            rows.append((f"experts.{expert}.down", (HIDDEN, EXPERT_HIDDEN)))
        for name, shape in rows:
            if left > 0:
                yield f"{prefix}.{name}", shape
            left -= torch.Size(shape).numel()
        layer += 1


def weights(options: Options, seed: int) -> dict[str, torch.Tensor]:
    """fp32 masters: matrices normal with deviation 0.02, norms one."""
    random = options.random(seed)
    return {
        name: torch.randn(shape, generator=random, device=options.device).mul_(0.02)
        if len(shape) > 1
        else torch.ones(shape, device=options.device)
        for name, shape in shapes(options.parameters)
    }


def published(masters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: master.to(torch.bfloat16) for name, master in masters.items()}


def bytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def process_bytes() -> int:
    """Memory that this process has in use, without what its allocator only keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def seconds(options: Options, work: Callable[[], object]) -> float:
    began = options.clock()
    work()
    return options.clock() - began


def settings(options: Options, record_bytes: int, *, shadow: bool, verify: str) -> SnapshotConfig:
    """Records in the memory that the weights are in."""
    keep = options.versions + 1
    return SnapshotConfig(
        host_bytes=record_bytes if options.on_host else 0,
        device_bytes=0 if options.on_host else record_bytes,
        keep_last=keep,
        shadow=shadow,
        verify=verify,
        threads=options.threads,
    )


def copies(options: Options, nbytes: int, verify: str) -> SnapshotConfig:
    """Two full copies in host memory."""
    return SnapshotConfig(
        host_bytes=nbytes,
        keep_last=options.versions + 1,
        verify=verify,
        threads=options.threads,
        pin_memory=not options.on_host,
    )


def move(options: Options, tensors: dict[str, torch.Tensor], share: float, seed: int) -> None:
    """Move a share of the weights to the next bf16 number."""
    chosen = (one_for_all(options, tensors, seed, torch.rand) < share).to(torch.int16)
    for tensor in tensors.values():
        tensor.view(torch.int16).view(-1).add_(chosen[: tensor.numel()])


def one_for_all(
    options: Options, tensors: dict[str, torch.Tensor], seed: int, draw: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Random numbers for the largest tensor; every other takes the first of them, which saves most of the time."""
    size = max(tensor.numel() for tensor in tensors.values())
    return draw(size, generator=options.random(seed), device=options.device)


def there_and_back(
    options: Options, store: SnapshotStore | FullCopyStore, version: int
) -> tuple[float, float]:
    """Seconds until the weights are at the version, and until they are back."""
    wait = torch.get_device_module(options.device).synchronize
    wait()
    began = options.clock()
    with store.at(version):
        wait()
        there = options.clock()
    wait()
    return there - began, options.clock() - there


# ---- by density ------------------------------------------------------------------------------------------------------


def by_density(options: Options) -> Iterator[Row]:
    """Captures and one-step restores against a copy."""
    tensors = published(weights(options, 0))
    pin = not options.on_host
    copy = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        for name, tensor in tensors.items()
    }
    nbytes = bytes_of(tensors)

    def plain() -> None:
        for name, tensor in tensors.items():
            copy[name].copy_(tensor, non_blocking=True)
        torch.get_device_module(options.device).synchronize()

    plain()
    for share in DENSITIES:
        copied = [seconds(options, plain)]
        results: dict[str, float] = {}
        for verify in ("off", "full"):
            config = settings(options, nbytes * 3, shadow=True, verify=verify)
            with SnapshotStore(tensors, version=0, config=config) as store:
                captures: list[float] = []
                restores: list[float] = []
                for version in range(1, 4):
                    move(options, tensors, share, version)
                    captures.append(seconds(options, partial(store.capture, version)))
                    copied.append(seconds(options, plain))
                for _ in range(ROUNDS):
                    restores += there_and_back(options, store, 2)
                    copied.append(seconds(options, plain))
            results[verify] = min(restores)
            results["capture"] = min(*captures, results.get("capture", captures[0]))
        yield from density_rows(options, share, nbytes, min(copied), results)


def density_rows(
    options: Options, share: float, nbytes: int, copied: float, results: dict[str, float]
) -> Iterator[Row]:
    percent = f"{100 * share:g}"
    gigabytes = nbytes / 1e9
    where = (
        f"{100 * share:g} % of {nbytes / 2e6:.0f} M bf16 weights changed, {options.device}, {options.time_text}; "
        f"copy {gigabytes / copied:.1f}, capture {gigabytes / results['capture']:.1f}, restore "
        f"{gigabytes / results['off']:.1f}, restore with digests {gigabytes / results['full']:.1f} GB/s of weights"
    )
    named = options.goals
    goals = {
        0.02: (named["capture"], named["restore"]),
        0.005: ("", named["restore_sparse"]),
    }.get(share, ("", ""))
    suffix = "" if share == 0.02 else f"_at_{percent}_percent"
    yield Row(f"capture_ratio{suffix}", round(copied / results["capture"], 3), "", goals[0], where)
    yield Row(f"restore_ratio{suffix}", round(copied / results["off"], 3), "", goals[1], where)
    yield Row(f"restore_with_digest_ratio{suffix}", round(copied / results["full"], 3), "", "", where)


# ---- by learning rate ------------------------------------------------------------------------------------------------


class Adam:
    """One optimiser per master, so that only one tensor's gradient exists at a time."""

    def __init__(self, options: Options, masters: dict[str, torch.Tensor], lr: float) -> None:
        self._options, self._masters, self._steps = options, masters, 0
        self._parts = [
            torch.optim.Adam([master], lr=lr, betas=(0.9, 0.98), eps=1e-8, foreach=False)
            for master in masters.values()
        ]

    def step(self) -> None:
        self._steps += 1
        gradient = one_for_all(self._options, self._masters, self._steps, torch.randn).mul_(1e-3)
        for optimizer in self._parts:
            (master,) = optimizer.param_groups[0]["params"]
            master.grad = gradient[: master.numel()].view_as(master)
            optimizer.step()
            master.grad = None

    def allocate(self) -> None:
        """Make the moments, which would otherwise appear with the first step."""
        for optimizer in self._parts:
            (group,) = optimizer.param_groups
            (master,), lr, group["lr"] = group["params"], group["lr"], 0.0
            master.grad = torch.zeros_like(master)
            optimizer.step()
            master.grad, group["lr"] = None, lr
            optimizer.state[master]["step"].zero_()


def load_kernels(options: Options) -> None:
    """Compiled code comes into memory with its first use, and belongs to no history."""
    tensors = {"tensor": torch.zeros(1 << 17, dtype=torch.bfloat16, device=options.device)}
    config = settings(options, 1 << 20, shadow=False, verify="full")
    with SnapshotStore(tensors, version=0, config=config) as store:
        for version, share in enumerate((0.02, 1.0), 1):
            new = {name: tensor.clone() for name, tensor in tensors.items()}
            move(options, new, share, version)
            store.capture_update(version, new.items())
        there_and_back(options, store, 0)


def by_learning_rate(options: Options, lr: float) -> Iterator[Row]:
    """Memory of the history, and the switch to the version before and back."""
    masters = weights(options, 1)
    live = published(masters)
    optimizer = Adam(options, masters, lr)
    optimizer.allocate()
    load_kernels(options)
    nbytes, before = bytes_of(live), process_bytes()
    config = settings(options, nbytes * options.versions, shadow=False, verify="full")
    with SnapshotStore(live, version=0, config=config) as store:
        changed, took = [], []
        for version in range(1, options.versions + 1):
            optimizer.step()
            new = ((name, master.to(torch.bfloat16)) for name, master in masters.items())
            report = store.capture_update(version, new)
            changed.append(report.changed)
            took.append(report.seconds)
        grown = process_bytes() - before
        # What takes the place of the masters must not be counted, and their memory is needed for the full copies.
        del optimizer, masters
        yield from memory_rows(options, lr, store, (nbytes, grown), changed, took)
        yield from switch_rows(options, lr, store, live, nbytes)


def name_of(lr: float) -> str:
    return f"lr{lr:.0e}".replace("e-0", "e-")


def memory_rows(
    options: Options,
    lr: float,
    store: SnapshotStore,
    sizes: tuple[int, int],
    changed: list[float],
    took: list[float],
) -> Iterator[Row]:
    """sizes: bytes of the weights, and of the growth of the process."""
    (nbytes, grown), usage = sizes, store.usage()
    used, full = usage["host" if options.on_host else "device"], options.versions * sizes[0]
    shares = ", ".join(f"{100 * share:.1f}" for share in changed)
    where = (
        f"{options.versions} versions of {nbytes / 2e6:.0f} M bf16 weights (Qwen3-MoE), Adam at lr {lr:g} with fp32 "
        f"masters; {shares} % of the weights changed (dense tasks count in full); {used / 1e6:.0f} MB of records, "
        f"copies {full / 1e6:.0f} MB; captures of {1e3 * min(took):.0f}-{1e3 * max(took):.0f} ms"
    )
    goal = {1e-6: f"<= {1 / 16}", 1e-4: "<= 1.1"}.get(lr, "")
    name = name_of(lr)
    yield Row(
        f"memory_ratio_{name}", round(used / full, 4), "", goal, where + "; streamed updates, no shadow"
    )
    if options.on_host:
        everything = f"{where}; everything the process took from opening the store on: {grown / 1e6:.0f} MB"
        yield Row(f"memory_process_ratio_{name}", round(grown / full, 4), "", goal, everything)
    shadowed = round((used + nbytes) / full, 4)
    yield Row(f"memory_with_shadow_ratio_{name}", shadowed, "", "", where + "; with a shadow copy")


def switch_rows(
    options: Options, lr: float, store: SnapshotStore, live: dict[str, torch.Tensor], nbytes: int
) -> Iterator[Row]:
    """Both stores in turns: to the version before and back, and to the oldest and back."""
    newest = store.live_version
    for verify in ("full", "off"):
        config = copies(options, 2 * nbytes + (1 << 20), verify)
        store.config = config
        for gap in (1, options.versions):
            full = FullCopyStore(live, version=newest, config=config)
            full._copies[newest - gap] = full._copies[newest]
            deltas, full_copies = [], []
            for _ in range(ROUNDS):
                deltas.append(sum(there_and_back(options, store, newest - gap)))
                full_copies.append(sum(there_and_back(options, full, newest - gap)))
            full.close()
            suffix = (
                name_of(lr) + ("" if gap == 1 else f"_gap{gap}") + ("" if verify == "full" else "_unchecked")
            )
            goal = (
                {1e-6: options.goals["switch"], 1e-4: "<= 1.1"}.get(lr, "")
                if gap == 1 and verify == "full"
                else ""
            )
            where = (
                f"gap {gap}, {nbytes / 2e6:.0f} M bf16 weights, {options.time_text}, digests {verify} "
                f"on both sides; {1e3 * min(deltas):.0f} ms, full copies {1e3 * min(full_copies):.0f} ms"
            )
            yield Row(f"switch_ratio_{suffix}", round(min(deltas) / min(full_copies), 3), "", goal, where)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=128e6, help="weights (default 128e6)")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of the stores and of PyTorch's copies"
    )
    parser.add_argument("--versions", type=int, default=8, help="updates per learning rate")
    parser.add_argument("--device", default="cpu", help="where the weights are (default cpu)")
    parts = ("density", *map(str, RATES))
    parser.add_argument(
        "--parts",
        default=",".join(parts),
        help="comma-separated: density, learning rates (default: %(default)s)",
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    options = Options(int(arguments.parameters), arguments.threads, arguments.versions, arguments.device)
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for part in arguments.parts.split(","):
        rows += by_density(options) if part == "density" else by_learning_rate(options, float(part))
    for row in rows:
        verdict = "" if row.passed is None else ("  ok" if row.passed else "  MISSED")
        print(f"{row.figure:42} {row.value:8} {row.goal:10}{verdict}   {row.conditions}")
    if not arguments.no_write:
        name = "snapshot" if options.on_host else "snapshot_device"
        print(f"written to {write_rows(name, rows)}")


if __name__ == "__main__":
    main()
