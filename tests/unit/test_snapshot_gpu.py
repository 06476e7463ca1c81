"""The store with weights on a GPU: same bits, same records as on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_async.snapshots import FullCopyStore, SnapshotConfig, SnapshotStore
from tests.snapshot_support import bits, mixed_tensors, same, toggle

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{"device_bytes": 1 << 26}, {"pin_memory": True}, {"host_bytes": 0}])
def test_every_version_from_every_other_on_a_gpu(options: dict[str, int], tmp_path: Path) -> None:
    host = mixed_tensors()
    tensors = {name: tensor.cuda() for name, tensor in host.items()}
    config = SnapshotConfig(**({"host_bytes": 1 << 26, "keep_last": 99} | options))
    on_host = SnapshotStore(host, version=0, config=SnapshotConfig(host_bytes=1 << 26, keep_last=99))
    with SnapshotStore(tensors, version=0, config=config, directory=tmp_path) as store:
        history = {0: bits(tensors)}
        for version in range(1, 6):
            toggle(host, 0.02 * version**2, version)
            for name, tensor in tensors.items():
                tensor.copy_(host[name])
            store.capture(version)
            on_host.capture(version)
            history[version] = bits(tensors)
            assert store.digest(version) == on_host.digest(version)
        for first in history:
            for second in history:
                with store.journey() as journey:
                    journey.go(first)
                    journey.go(second)
                    assert same(tensors, history[second])
                assert same(tensors, history[5])
    on_host.close()


@pytest.mark.parametrize("options", [{"device_bytes": 1 << 26}, {"pin_memory": True}])
def test_updates_staged_on_a_gpu_need_no_copy(options: dict[str, int]) -> None:
    tensors = {name: tensor.cuda() for name, tensor in mixed_tensors().items()}
    config = SnapshotConfig(**({"host_bytes": 1 << 26, "keep_last": 99, "shadow": False} | options))
    with SnapshotStore(tensors, version=0, config=config) as store:
        history = {0: bits(tensors)}
        for version in range(1, 6):
            for part in range(2):
                new = {name: tensor.cpu() for name, tensor in tensors.items()}
                toggle(new, 0.01 * version, 10 * version + part)
                store.stage_update((name, tensor.cuda()) for name, tensor in new.items())
                assert same(tensors, bits({name: tensor.cuda() for name, tensor in new.items()}))
            store.capture(version)
            history[version] = bits(tensors)
        for version, wanted in history.items():
            with store.at(version):
                assert same(tensors, wanted)
        assert same(tensors, history[5])


def test_full_copies_in_pinned_memory_give_the_same_bits() -> None:
    tensors = {name: tensor.cuda() for name, tensor in mixed_tensors().items()}
    config = SnapshotConfig(host_bytes=1 << 26, keep_last=99, pin_memory=True)
    with FullCopyStore(tensors, version=0, config=config) as store:
        before = bits(tensors)
        for tensor in tensors.values():
            tensor.reshape(-1).view(torch.uint8).bitwise_not_()
        after = bits(tensors)
        store.capture(1)
        with store.at(0):
            assert same(tensors, before)
        assert same(tensors, after)
