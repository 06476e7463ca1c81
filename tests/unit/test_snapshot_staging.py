"""Histories without a shadow copy: the step is recorded before the new bits are written, and gets its number later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_async.snapshots import (
    BudgetExceededError,
    DiskFullError,
    SnapshotBusyError,
    SnapshotConfig,
    SnapshotError,
    SnapshotStore,
    TensorSetError,
)
from tests.snapshot_support import Bits, bits, mixed_tensors, same, toggle

NO_SHADOW = SnapshotConfig(host_bytes=1 << 24, keep_last=99, shadow=False, task_words=65_536)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return mixed_tensors()


def moved(tensors: dict[str, torch.Tensor], seed: int, share: float = 0.03) -> dict[str, torch.Tensor]:
    """What an update would make of the tensors."""
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    toggle(new, share, seed)
    return new


def check_history(store: SnapshotStore, tensors: dict[str, torch.Tensor], history: dict[int, Bits]) -> None:
    for version, wanted in history.items():
        with store.at(version):
            assert same(tensors, wanted), version
    assert same(tensors, history[store.live_version])


def test_streamed_updates_need_no_copy_and_are_all_or_nothing(tensors: dict[str, torch.Tensor]) -> None:
    with SnapshotStore(tensors, version=0, config=NO_SHADOW) as store:
        before = bits(tensors)
        new = {name: tensor.clone() for name, tensor in tensors.items()}
        toggle(new, 0.03, 5)
        assert store.usage()["shadow"] == 0
        incomplete = [(name, tensor) for name, tensor in new.items() if name != "half"]
        for given, message in (
            (incomplete, "lack 1 tensors, the first is 'half'"),
            ([*new.items(), ("half", new["half"])], "no .*further.* tensor of that name"),
            ([("half", new["half"].float())], r"'half' as float32\[1001\]; expected float16\[1001\]"),
        ):
            with pytest.raises(TensorSetError, match=message):
                store.capture_update(1, given)
            assert same(tensors, before)
        store.capture_update(1, reversed(new.items()))
        assert same(tensors, bits(new))
        with store.at(0):
            assert same(tensors, before)
        with pytest.raises(SnapshotError, match="no shadow copy to compare with and no update was staged"):
            store.capture(2)


def test_a_failing_stream_changes_nothing(tensors: dict[str, torch.Tensor]) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embedding", torch.zeros_like(tensors["embedding"])
        raise ConnectionResetError("the masters went away")

    with SnapshotStore(tensors, version=0, config=NO_SHADOW) as store:
        before, used = bits(tensors), store.usage()
        with pytest.raises(ConnectionResetError):
            store.capture_update(1, broken())
        assert same(tensors, before)
        assert store.usage() == used
        assert store.versions() == [0]


@pytest.mark.parametrize("host_bytes", [1 << 24, 30_000, 0])
@pytest.mark.parametrize("parts", [1, 3])
def test_staged_updates_become_versions(
    tensors: dict[str, torch.Tensor], tmp_path: Path, host_bytes: int, parts: int
) -> None:
    """In memory, over its edge and on disk alone; one update per version, or several that one record spans."""
    history = {0: bits(tensors)}
    config = replace(NO_SHADOW, host_bytes=host_bytes)
    with SnapshotStore(tensors, version=0, config=config, directory=tmp_path) as store:
        for version in range(1, 5):
            for part in range(parts):
                new = moved(tensors, seed=10 * version + part)
                store.stage_update(new.items())
                assert same(tensors, bits(new))
            report = store.capture_in_background(version).result()
            assert (report.version, report.parent) == (version, version - 1)
            history[version] = bits(tensors)
        assert store.usage()["shadow"] == 0
        check_history(store, tensors, history)
    assert not list(tmp_path.glob("staged-*"))
    with SnapshotStore(tensors, version=4, config=config, directory=tmp_path) as store:
        check_history(store, tensors, history)


def test_several_updates_of_one_version_cost_what_changed_between_the_versions(
    tensors: dict[str, torch.Tensor],
) -> None:
    """Back to the version's own bits: nothing is left of the record."""
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with SnapshotStore(tensors, version=0, config=NO_SHADOW) as store:
        store.stage_update(moved(tensors, seed=1).items())
        store.stage_update(before.items())
        report = store.capture(1)
        assert (report.nbytes, report.changed) == (0, 0.0)
        assert same(tensors, bits(before))
        assert store.digest(0) == store.digest(1)


def test_nothing_travels_before_the_update_has_a_number(tensors: dict[str, torch.Tensor]) -> None:
    with SnapshotStore(tensors, version=0, config=NO_SHADOW) as store:
        store.stage_update(moved(tensors, seed=1).items())
        store.capture(1)
        store.stage_update(moved(tensors, seed=2).items())
        now = bits(tensors)
        with pytest.raises(
            SnapshotBusyError, match="version 0 cannot be restored.*update of version 1.*capture"
        ):
            with store.at(0):
                pass
        with pytest.raises(SnapshotBusyError, match="capture"):
            store.keyframe()
        assert same(tensors, now)
        store.capture(2)
        with store.at(0), pytest.raises(SnapshotBusyError, match="inside"):
            store.stage_update(moved(tensors, seed=3).items())
        assert same(tensors, now)


def test_a_staged_update_that_fails_leaves_the_one_before(tensors: dict[str, torch.Tensor]) -> None:
    """Too large for the budget, or broken off: the weights and the record before it stay."""
    history = {0: bits(tensors)}
    with SnapshotStore(tensors, version=0, config=replace(NO_SHADOW, host_bytes=200_000)) as store:
        store.stage_update(moved(tensors, seed=1, share=0.005).items())
        history[1] = bits(tensors)
        with pytest.raises(BudgetExceededError, match="update of version 0.*host_bytes"):
            store.stage_update(moved(tensors, seed=2, share=0.5).items())
        assert same(tensors, history[1])
        store.capture(1)
        check_history(store, tensors, history)


def test_a_full_disk_refuses_the_version_and_keeps_the_update(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    history = {0: bits(tensors)}
    with SnapshotStore(
        tensors, version=0, config=replace(NO_SHADOW, disk_bytes=20_000), directory=tmp_path
    ) as store:
        store.stage_update(moved(tensors, seed=1).items())
        history[1] = bits(tensors)
        with pytest.raises(DiskFullError, match=r"record-00000001\.delta in .*disk budget"):
            store.capture(1)
        assert same(tensors, history[1])
        assert store._directory is not None
        store._directory.budget = None
        store.capture(1)
        check_history(store, tensors, history)


def test_a_shadow_and_staging_exclude_each_other(tensors: dict[str, torch.Tensor]) -> None:
    now = bits(tensors)
    with SnapshotStore(tensors, version=0, config=replace(NO_SHADOW, shadow=True)) as store:
        for use in (
            lambda new: store.stage_update(new.items()),
            lambda new: store.capture_update(1, new.items()),
        ):
            with pytest.raises(SnapshotError, match="shadow"):
                use(moved(tensors, seed=1))
            assert same(tensors, now)
