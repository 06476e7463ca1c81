"""The store with weights on a GPU: same bits, same records as on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async.snapshots import SnapshotConfig, SnapshotStore
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
