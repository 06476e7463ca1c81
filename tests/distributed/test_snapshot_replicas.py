"""Data-parallel ranks that keep one history between them (two processes, gloo)."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_async.snapshots import DigestMismatchError, SnapshotConfig, SnapshotStore
from megatron_async.snapshots.bits import TensorSpec
from megatron_async.snapshots.replicas import ReplicaGroup, owners_of
from tests.snapshot_support import Adam, bits, same

SIZES = {"embedding": 90_000, "experts": 80_000, "norm": 50, "head": 10_000}


def run_rank(rank: int, folder: Path, streamed: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    adam = Adam(SIZES, lr=1e-5)
    config = SnapshotConfig(host_bytes=16 << 20, keep_last=99, shadow=not streamed, keyframe_every=4)
    replicas = ReplicaGroup()
    directory = folder / f"rank{rank}"
    with SnapshotStore(
        adam.tensors, version=0, config=config, directory=directory, replicas=replicas
    ) as store:
        history = {0: bits(adam.tensors)}
        for version in range(1, 7):
            adam.step()
            if streamed:
                store.capture_update(version, ((n, m.to(torch.bfloat16)) for n, m in adam.masters.items()))
            else:
                adam.publish()
                store.capture(version)
            history[version] = bits(adam.tensors)
        for version in (5, 0, 3, 6):
            with store.at(version):
                assert same(adam.tensors, history[version]), version
            assert same(adam.tensors, history[6]), version
        if rank == 1:
            adam.tensors["norm"][0] += 1
        raised = False
        try:
            with store.at(2):
                pass
        except DigestMismatchError:
            raised = True
        assert raised, "one rank's wrong weights fail the walk on all"
        torch.save({"usage": store.usage(), "raised": raised}, folder / f"result{rank}.pt")
    dist.destroy_process_group()


def check_two_ranks(folder: Path, streamed: bool) -> None:
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit process groups of other tests
    ranks = [spawn.Process(target=run_rank, args=(rank, folder, streamed)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
    assert [process.exitcode for process in ranks] == [0, 0]
    usages = [torch.load(folder / f"result{rank}.pt")["usage"] for rank in range(2)]
    shadow = 0 if streamed else 2 * sum(SIZES.values())
    assert usages[0]["shadow"] + usages[1]["shadow"] == shadow, "one shadow between the two"
    assert 0.7 < usages[0]["host"] / usages[1]["host"] < 1.4, "each holds about half of the records"


def test_two_ranks_keep_one_history(tmp_path: Path) -> None:
    check_two_ranks(tmp_path, streamed=False)
    assert (tmp_path / "result1.pt").exists()


def test_streamed_updates_reach_the_tensors_that_others_own(tmp_path: Path) -> None:
    check_two_ranks(tmp_path, streamed=True)
    assert (tmp_path / "result1.pt").exists()


def test_ownership_is_balanced_and_follows_from_sizes() -> None:
    sizes = (100, 1, 60, 60, 0)
    specs = [TensorSpec(f"t{n}", "bfloat16", (size,), 2 * size, 2) for n, size in enumerate(sizes)]
    assert owners_of(specs, 2) == [0, 0, 1, 1, 0]
    assert owners_of(specs, 1) == [0] * 5
