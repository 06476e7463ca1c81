"""Histories of weights that Adam really makes: densities, memory, and fifty versions bit for bit."""

from __future__ import annotations

import pytest
import torch

from megatron_async.snapshots import FullCopyStore, SnapshotConfig, SnapshotStore
from tests.snapshot_support import Adam, bits, same

SIZES = {"embedding": 300_000, "experts": 500_001, "norm": 64}
TOTAL_BYTES = 2 * sum(SIZES.values())


def test_fifty_consecutive_versions_from_each_other_bit_for_bit() -> None:
    """Neighbours in both directions, and every version from the newest; learning rates from 1e-7 to 1e-2."""
    adam = Adam({"a": 40_000, "b": 70_001}, lr=1e-6)
    config = SnapshotConfig(host_bytes=32 << 20, keep_last=99, task_words=65_536, keyframe_every=20)
    with SnapshotStore(adam.tensors, version=0, config=config) as store:
        history = {0: bits(adam.tensors)}
        for version in range(1, 51):
            adam.optimizer.param_groups[0]["lr"] = 10.0 ** (-7 + version % 6)
            adam.step()
            adam.publish()
            store.capture(version)
            history[version] = bits(adam.tensors)
        with store.journey() as journey:
            for version in [*range(50, -1, -1), *range(51)]:
                journey.go(version)
                assert same(adam.tensors, history[version]), version
        for version in range(50):
            with store.at(version):
                assert same(adam.tensors, history[version]), version
            assert same(adam.tensors, history[50]), version


def record_bytes(lr: float, versions: int = 8) -> tuple[int, list[float]]:
    """Bytes that records of `versions` updates take in memory, and the share of weights that changed in each."""
    adam = Adam(SIZES, lr=lr)
    config = SnapshotConfig(host_bytes=32 << 20, keep_last=99)
    with SnapshotStore(adam.tensors, version=0, config=config) as store:
        changed = []
        for version in range(1, versions + 1):
            adam.step()
            adam.publish()
            changed.append(store.capture(version).changed)
        return store.usage()["host"], changed


def test_eight_versions_at_a_usual_learning_rate_take_a_sixteenth_of_eight_copies() -> None:
    used, changed = record_bytes(1e-6)
    assert used <= 8 * TOTAL_BYTES / 16, f"{used / (8 * TOTAL_BYTES):.4f} of eight copies"
    assert 0.03 < changed[0] < 0.055, (
        "4.2 % at the first step, when Adam moves every weight by the learning rate"
    )
    assert 0.01 < changed[-1] < 0.025
    assert changed == sorted(changed, reverse=True)


@pytest.mark.parametrize("lr", [1e-4, 1e-2])
def test_at_large_learning_rates_records_are_never_larger_than_copies(lr: float) -> None:
    used, _ = record_bytes(lr)
    assert used <= 1.01 * 8 * TOTAL_BYTES


def test_full_copies_give_the_same_bits() -> None:
    adam = Adam(SIZES, lr=1e-5)
    config = SnapshotConfig(host_bytes=5 * (TOTAL_BYTES + 1_024), keep_last=9)
    delta = SnapshotStore(adam.tensors, version=0, config=config)
    full = FullCopyStore(adam.tensors, version=0, config=config)
    for version in range(1, 5):
        adam.step()
        adam.publish()
        delta.capture(version)
        full.capture(version)
    for version in range(5):
        with delta.at(version):
            wanted = bits(adam.tensors)
        with full.at(version):
            assert same(adam.tensors, wanted)
    assert full.usage()["host"] >= 5 * TOTAL_BYTES > delta.usage()["host"]
    delta.close()
    full.close()


def test_masters_cast_one_by_one_need_no_shadow() -> None:
    """The order of mixed-precision training: masters step, the difference is recorded, the weights follow."""
    adam = Adam(SIZES, lr=1e-5)
    config = SnapshotConfig(host_bytes=32 << 20, keep_last=9, shadow=False)
    with SnapshotStore(adam.tensors, version=0, config=config) as store:
        start = bits(adam.tensors)
        for version in (1, 2, 3):
            adam.step()
            store.capture_update(version, ((name, m.to(torch.bfloat16)) for name, m in adam.masters.items()))
            assert same(adam.tensors, bits({name: m.to(torch.bfloat16) for name, m in adam.masters.items()}))
        with store.at(0):
            assert same(adam.tensors, start)
        assert store.usage()["shadow"] == 0
