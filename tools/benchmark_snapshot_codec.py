"""What a history of weights costs: captures and restores against memory copies, memory against full copies.

    python -m tools.benchmark_snapshot_codec [--parameters 128e6] [--threads 1] [--device cpu] [--no-write]

Two parts, both in bf16 and through the store's public calls:

1. By density: a share of the weights moves by one unit in the last place; `capture` and a one-step `journey.go` are
   timed against a plain copy of the weights, taken in turns in the same run.
2. By learning rate: fp32 masters under torch.optim.Adam with random gradients, published as bf16 for some versions;
   memory of the records against as many full copies, and the switch to the version before and back against
   `FullCopyStore`, each with and without digests.

On another device the plain copies and the full copies go to page-locked host memory, as trainers keep them there.

Every timing is the best of several rounds, on both sides. Rows go to docs/benchmarks/snapshot.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron_async.snapshots import FullCopyStore, SnapshotConfig, SnapshotStore
from tools.benchmark_rows import Row, write_rows

DENSITIES = (0.005, 0.02, 0.09, 0.5)
RATES = (1e-6, 1e-5, 1e-4)
ROUNDS = 5
TENSOR = 1 << 24


@dataclass(frozen=True, slots=True)
class Options:
    parameters: int
    threads: int
    versions: int
    device: str

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"


def weights(parameters: int, seed: int) -> dict[str, torch.Tensor]:
    """fp32 masters of a model: normal with deviation 0.02, in tensors of at most 16 Mi."""
    random = torch.Generator().manual_seed(seed)
    sizes = [min(TENSOR, parameters - start) for start in range(0, parameters, TENSOR)]
    return {f"tensor.{n}": torch.randn(size, generator=random).mul_(0.02) for n, size in enumerate(sizes)}


def published(options: Options, masters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: master.to(options.device, torch.bfloat16) for name, master in masters.items()}


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def settings(options: Options, host_bytes: int, *, shadow: bool, verify: str) -> SnapshotConfig:
    keep = options.versions + 1
    return SnapshotConfig(
        host_bytes=host_bytes,
        keep_last=keep,
        shadow=shadow,
        verify=verify,
        threads=options.threads,
        pin_memory=not options.on_host,
    )


def move(tensors: dict[str, torch.Tensor], share: float, seed: int) -> None:
    """Move a share of the weights to the next bf16 number."""
    random = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        words = tensor.view(torch.int16)
        words.add_((torch.rand(words.shape, generator=random) < share).to(words.device, torch.int16))


def there_and_back(
    options: Options, store: SnapshotStore | FullCopyStore, version: int
) -> tuple[float, float]:
    """Seconds until the weights are at the version, and until they are back."""
    wait = torch.get_device_module(options.device).synchronize
    wait()
    began = time.perf_counter()
    with store.at(version):
        wait()
        there = time.perf_counter()
    wait()
    return there - began, time.perf_counter() - there


# ---- by density ------------------------------------------------------------------------------------------------------


def by_density(options: Options) -> Iterator[Row]:
    """Captures and one-step restores against a copy."""
    tensors = published(options, weights(options.parameters, 0))
    pin = not options.on_host
    copy = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        for name, tensor in tensors.items()
    }
    nbytes = sum(tensor.numel() * 2 for tensor in tensors.values())

    def plain() -> None:
        for name, tensor in tensors.items():
            copy[name].copy_(tensor)

    plain()
    for share in DENSITIES:
        copies = [seconds(plain)]
        results: dict[str, float] = {}
        for verify in ("off", "full"):
            config = settings(options, nbytes * 3, shadow=True, verify=verify)
            with SnapshotStore(tensors, version=0, config=config) as store:
                captures: list[float] = []
                restores: list[float] = []
                for version in range(1, 4):
                    move(tensors, share, version)
                    captures.append(store.capture(version).seconds)
                    copies.append(seconds(plain))
                for _ in range(ROUNDS):
                    restores += there_and_back(options, store, 2)
                    copies.append(seconds(plain))
            results[verify] = min(restores)
            results["capture"] = min(*captures, results.get("capture", captures[0]))
        yield from density_rows(options, share, nbytes, min(copies), results)


def density_rows(
    options: Options, share: float, nbytes: int, copied: float, results: dict[str, float]
) -> Iterator[Row]:
    percent = f"{100 * share:g}"
    gigabytes = nbytes / 1e9
    where = (
        f"{100 * share:g} % of {options.parameters / 1e6:.0f} M bf16 weights changed, {options.threads} thread(s), "
        f"{options.device}; copy {gigabytes / copied:.1f}, capture {gigabytes / results['capture']:.1f}, restore "
        f"{gigabytes / results['off']:.1f}, restore with digests {gigabytes / results['full']:.1f} GB/s of weights"
    )
    goals = {0.02: (">= 0.3", ">= 1.2"), 0.005: ("", ">= 3")}.get(share, ("", ""))
    suffix = "" if share == 0.02 else f"_at_{percent}_percent"
    yield Row(f"capture_ratio{suffix}", round(copied / results["capture"], 3), "", goals[0], where)
    yield Row(f"restore_ratio{suffix}", round(copied / results["off"], 3), "", goals[1], where)
    yield Row(f"restore_with_digest_ratio{suffix}", round(copied / results["full"], 3), "", "", where)


# ---- by learning rate ------------------------------------------------------------------------------------------------


def by_learning_rate(options: Options, lr: float) -> Iterator[Row]:
    """Memory of the records, and the switch to the version before and back."""
    masters = {name: master.to(options.device) for name, master in weights(options.parameters, 1).items()}
    optimizer = torch.optim.Adam(list(masters.values()), lr=lr, betas=(0.9, 0.98), eps=1e-8, foreach=False)
    live = published(options, masters)
    nbytes = sum(tensor.numel() * 2 for tensor in live.values())
    random = torch.Generator().manual_seed(2)
    config = settings(options, nbytes * options.versions, shadow=False, verify="full")
    with SnapshotStore(live, version=0, config=config) as store:
        changed, took = [], []
        for version in range(1, options.versions + 1):
            for master in masters.values():
                master.grad = torch.randn(master.shape, generator=random).mul_(1e-3).to(options.device)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            new = ((name, master.to(torch.bfloat16)) for name, master in masters.items())
            report = store.capture_update(version, new)
            changed.append(report.changed)
            took.append(report.seconds)
        used = store.usage()["host"]
        yield from memory_rows(options, lr, used, nbytes, changed)
        yield from switch_rows(options, lr, store, live, nbytes)


def name_of(lr: float) -> str:
    return f"lr{lr:.0e}".replace("e-0", "e-")


def memory_rows(options: Options, lr: float, used: int, nbytes: int, changed: list[float]) -> Iterator[Row]:
    shares = ", ".join(f"{100 * share:.1f}" for share in changed)
    where = (
        f"{options.versions} versions of {options.parameters / 1e6:.0f} M bf16 weights, Adam at lr {lr:g} with fp32 "
        f"masters; {shares} % of the weights changed (dense tasks count in full); {used / 1e6:.0f} MB of records"
    )
    full = options.versions * nbytes
    goal = {1e-6: f"<= {1 / 16}", 1e-4: "<= 1.1"}.get(lr, "")
    yield Row(
        f"memory_ratio_{name_of(lr)}",
        round(used / full, 4),
        "",
        goal,
        where + "; streamed updates, no shadow",
    )
    shadowed = (used + nbytes) / full
    yield Row(
        f"memory_with_shadow_ratio_{name_of(lr)}", round(shadowed, 4), "", "", where + "; with a shadow copy"
    )


def switch_rows(
    options: Options, lr: float, store: SnapshotStore, live: dict[str, torch.Tensor], nbytes: int
) -> Iterator[Row]:
    """Both stores in turns: to the version before and back, and to the oldest and back."""
    newest = store.live_version
    for verify in ("full", "off"):
        config = settings(options, 2 * nbytes + (1 << 20), shadow=False, verify=verify)
        store.config = config
        for gap in (1, options.versions):
            full = FullCopyStore(live, version=newest, config=config)
            full._copies[newest - gap] = full._copies[newest]
            deltas, copies = [], []
            for _ in range(ROUNDS):
                deltas.append(sum(there_and_back(options, store, newest - gap)))
                copies.append(sum(there_and_back(options, full, newest - gap)))
            full.close()
            suffix = (
                name_of(lr) + ("" if gap == 1 else f"_gap{gap}") + ("" if verify == "full" else "_unchecked")
            )
            goal = {1e-6: "<= 0.75", 1e-4: "<= 1.1"}.get(lr, "") if gap == 1 and verify == "full" else ""
            where = (
                f"gap {gap}, {options.parameters / 1e6:.0f} M bf16 weights, {options.threads} thread(s), digests "
                f"{verify} on both sides; {1e3 * min(deltas):.0f} ms, full copies {1e3 * min(copies):.0f} ms"
            )
            yield Row(f"switch_ratio_{suffix}", round(min(deltas) / min(copies), 3), "", goal, where)


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
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    options = Options(int(arguments.parameters), arguments.threads, arguments.versions, arguments.device)
    torch.set_num_threads(options.threads)
    rows = list(by_density(options))
    for lr in RATES:
        rows += by_learning_rate(options, lr)
    for row in rows:
        verdict = "" if row.passed is None else ("  ok" if row.passed else "  MISSED")
        print(f"{row.figure:42} {row.value:8} {row.goal:10}{verdict}   {row.conditions}")
    if not arguments.no_write:
        name = "snapshot" if options.on_host else "snapshot_device"
        print(f"written to {write_rows(name, rows)}")


if __name__ == "__main__":
    main()
