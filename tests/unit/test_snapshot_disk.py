"""The durable part of the store: what is on the disk is complete, checked, bounded, and survives being opened again."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.snapshots import (
    DamagedRecordError,
    DigestMismatchError,
    DiskFullError,
    FullCopyStore,
    SnapshotBusyError,
    SnapshotConfig,
    SnapshotStore,
    TensorSetError,
    UnknownVersionError,
)
from megatron_async.snapshots import record_file as record_module
from megatron_async.snapshots.references import References
from tests.snapshot_support import Bits, bits, refusal, same, toggle

DISK_ONLY = SnapshotConfig(host_bytes=0, keep_last=100)


def small_tensors() -> dict[str, torch.Tensor]:
    values = torch.randn(4_000, generator=torch.Generator().manual_seed(1))
    return {"layer.0": values.to(torch.bfloat16), "layer.1": values[:90].clone()}


def written(
    folder: Path, last: int = 4, kind: type[SnapshotStore | FullCopyStore] = SnapshotStore, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[int, Bits]]:
    """A closed store with versions 0 to `last`, live tensors at the last."""
    tensors = small_tensors()
    config = SnapshotConfig(**({"host_bytes": 0, "keep_last": 100} | options))
    history = {0: bits(tensors)}
    with kind(tensors, version=0, config=config, directory=folder) as store:
        for version in range(1, last + 1):
            toggle(tensors, 0.05, version)
            assert store.capture(version).tier == ("host" if config.host_bytes else "disk")
            history[version] = bits(tensors)
    return tensors, history


def test_versions_survive_and_numbering_goes_on(tmp_path: Path) -> None:
    tensors, history = written(tmp_path)
    with SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path) as store:
        for version, wanted in history.items():
            with store.at(version):
                assert same(tensors, wanted)
        toggle(tensors, 0.05, 99)
        store.capture(5)
        with store.at(0):
            assert same(tensors, history[0])


def test_a_resume_from_an_older_checkpoint_branches(tmp_path: Path) -> None:
    """The trainer comes back at version 2, and 3 and 4 stay scorable beside the new 5."""
    tensors, history = written(tmp_path)
    for name, tensor in tensors.items():
        tensor.reshape(-1).view(torch.uint8).copy_(history[2][name])
    with SnapshotStore(tensors, version=2, config=DISK_ONLY, directory=tmp_path) as store:
        toggle(tensors, 0.05, 77)
        assert store.capture(5).parent == 2
        for version in (4, 0, 3):
            with store.at(version):
                assert same(tensors, history[version])


def test_reopened_versions_stay_until_the_bank_has_spoken(tmp_path: Path) -> None:
    tensors, _ = written(tmp_path)
    config = SnapshotConfig(host_bytes=0, keep_last=1)
    with SnapshotStore(tensors, version=4, config=config, directory=tmp_path) as store:
        toggle(tensors, 0.05, 5)
        store.capture(5)
        assert store.versions() == [0, 1, 2, 3, 4, 5]
        store.set_needed([3])
        assert store.collect() == [0, 1, 2]
    left = sorted(path.name for path in tmp_path.glob("*.delta"))
    assert left == ["record-00000004.delta", "record-00000005.delta"], "3 became the root"


def test_weights_that_are_not_the_version_are_refused(tmp_path: Path) -> None:
    tensors, _ = written(tmp_path)
    with pytest.raises(DigestMismatchError, match="live weights at opening are not version 3.*'layer.0'"):
        SnapshotStore(tensors, version=3, config=DISK_ONLY, directory=tmp_path)
    tensors["layer.0"][:2] = tensors["layer.0"][:2].flip(0)
    with pytest.raises(DigestMismatchError, match="not version 4"):
        SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path)


def test_an_unseen_version_opens_as_an_island(tmp_path: Path) -> None:
    tensors, history = written(tmp_path, keyframe_every=2)
    tensors["layer.1"] += 1
    with SnapshotStore(tensors, version=9, config=DISK_ONLY, directory=tmp_path) as store:
        assert store.versions() == [0, 1, 2, 3, 4, 9], "through the keyframes of 2 and 4"
        wanted = bits(tensors)
        with store.at(1):
            assert same(tensors, history[1])
        assert same(tensors, wanted)


def test_one_store_per_directory_and_one_set_of_tensors(tmp_path: Path) -> None:
    tensors, _ = written(tmp_path)
    with SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path):
        with pytest.raises(SnapshotBusyError, match="used by another snapshot store"):
            SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path)
    other = {"layer.0": tensors["layer.0"].half(), "layer.1": tensors["layer.1"]}
    with pytest.raises(TensorSetError, match="history of other tensors"):
        SnapshotStore(other, version=4, config=DISK_ONLY, directory=tmp_path)


def test_a_record_cut_or_flipped_anywhere_is_refused_and_nothing_moves(tmp_path: Path) -> None:
    """Sixty places of the file, truncated there and with one bit changed there."""
    tensors, history = written(tmp_path)
    path = tmp_path / "record-00000003.delta"
    whole = path.read_bytes()
    store = SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path)
    places = range(0, len(whole), max(1, len(whole) // 60))
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 0x10
        for content, what in ((whole[:place], "cut"), (bytes(flipped), "flipped")):
            path.write_bytes(content)
            if what == "flipped" and not _payload(whole, place):
                continue
            with pytest.raises(DamagedRecordError, match=r"record-00000003\.delta.*forget"):
                with store.at(1):
                    pytest.fail("the block must not run")
            assert same(tensors, history[4]), (place, what)
    path.unlink()
    with pytest.raises(DamagedRecordError, match="the file is missing: 0 of"):
        with store.at(1):
            pytest.fail("the block must not run")
    path.write_bytes(whole)
    with store.at(1):
        assert same(tensors, history[1])
    store.close()


def _payload(content: bytes, place: int) -> bool:
    """Whether a byte of a record file belongs to a payload (tables are read at opening, padding means nothing)."""
    offset = int(np.frombuffer(content[-record_module.FOOTER_BYTES :][8:16], "<u8")[0])
    rows = np.frombuffer(content[offset : -record_module.FOOTER_BYTES], record_module.ROW)
    return any(row["offset"] <= place < row["offset"] + row["stored"] for row in rows)


def test_a_damaged_table_hurts_only_what_lies_behind_it(tmp_path: Path) -> None:
    tensors, history = written(tmp_path)
    path = tmp_path / "record-00000002.delta"
    whole = path.read_bytes()
    table = len(whole) - record_module.FOOTER_BYTES - 2 * record_module.ROW.itemsize
    contents = [whole[:20], whole[:-1], b""]
    for place in range(table, len(whole), 5):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        contents.append(bytes(flipped))
    for content in contents:
        path.write_bytes(content)
        with SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path) as store:
            assert store.versions() == [2, 3, 4]
            with store.at(2):
                assert same(tensors, history[2])
            with pytest.raises(
                DamagedRecordError, match=r"version 1 cannot be reached.*record-00000002\.delta"
            ):
                with store.at(1):
                    pytest.fail("the block must not run")
            assert same(tensors, history[4])
    path.write_bytes(whole)
    with SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path) as store:
        assert store.versions() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "content", ["", "{", '{"format": 1}', "[]", '{"format": 1, "signature": "", "versions": {"x": 1}}']
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: str) -> None:
    tensors, _ = written(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DamagedRecordError, match=r"manifest\.json cannot be read"):
        SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path)


def test_damaged_digests_are_refused(tmp_path: Path) -> None:
    tensors, _ = written(tmp_path)
    path = tmp_path / "digests-00000002.bin"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(DamagedRecordError, match="digests of version 2"):
        SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path)


def test_leftovers_of_a_crash_are_removed_and_named_files_are_not(tmp_path: Path) -> None:
    tensors, history = written(tmp_path)
    for name in (
        "record-00000007.delta",
        "record-00000008.delta.partial",
        "manifest.json.partial",
        "digests-00000007.bin",
    ):
        (tmp_path / name).write_bytes(b"half")
    named = {
        path.name for path in tmp_path.iterdir() if "0007" not in path.name and "partial" not in path.name
    }
    with SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path) as store:
        assert {path.name for path in tmp_path.iterdir()} == named
        with store.at(0):
            assert same(tensors, history[0])


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_a_disk_budget_refuses_by_name_and_leaves_no_trace(tmp_path: Path, host_bytes: int) -> None:
    tensors = small_tensors()
    config = SnapshotConfig(host_bytes=host_bytes, keep_last=100, disk_bytes=20_000)
    with SnapshotStore(tensors, version=0, config=config, directory=tmp_path) as store:
        history, version = {0: bits(tensors)}, 0
        error = None
        while error is None and version < 100:
            toggle(tensors, 0.2, version)
            error = refusal(store, version + 1)
            if error is None:
                version += 1
                history[version] = bits(tensors)
        assert isinstance(error, DiskFullError)
        assert re.search(r"record-\d+\.delta in .* needs more than .* disk budget.*disk_bytes", str(error))
        assert version > 2
        assert store.live_version == version
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
        assert not list(tmp_path.glob("*.partial"))
        refused = bits(tensors)
        store.set_needed([version])
        store._ledger._references._keep_last = 1
        assert store.capture(version + 1).version == version + 1, "older versions made room"
        with store.at(version):
            assert same(tensors, history[version])
        assert same(tensors, refused)


@pytest.mark.parametrize("fails_after", [0, 1, 2, 3, 4, 5])
def test_no_space_at_any_write_of_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_after: int
) -> None:
    """ENOSPC from the n-th fsync (record, digests, manifest): the version does not exist, and the next try works."""
    tensors, history = written(tmp_path)
    store = SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path)
    toggle(tensors, 0.05, 5)
    wanted, real, calls = bits(tensors), record_module.os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) > fails_after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(record_module.os, "fsync", full)
    with pytest.raises(DiskFullError, match="No space left on device"):
        store.capture(5)
    monkeypatch.undo()
    assert same(tensors, wanted)
    assert store.versions() == [0, 1, 2, 3, 4]
    store.capture(5)
    with store.at(2):
        assert same(tensors, history[2])
    store.close()
    with SnapshotStore(tensors, version=5, config=DISK_ONLY, directory=tmp_path) as again:
        assert again.versions() == [0, 1, 2, 3, 4, 5]


def test_a_copied_directory_is_as_good(tmp_path: Path) -> None:
    tensors, history = written(tmp_path / "a", compression_level=0)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path / "b") as store:
        with store.at(0):
            assert same(tensors, history[0])


def test_the_manifest_names_every_version(tmp_path: Path) -> None:
    written(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert {int(v): entry["parent"] for v, entry in content["versions"].items()} == {
        0: None,
        1: 0,
        2: 1,
        3: 2,
        4: 3,
    }
    assert [entry["record"] for entry in content["versions"].values()] == [False, True, True, True, True]


def test_compression_makes_files_smaller_and_changes_no_bit(tmp_path: Path) -> None:
    sizes = {}
    for level in (0, 3):
        tensors = {"w": torch.zeros(300_000, dtype=torch.bfloat16)}
        config = SnapshotConfig(host_bytes=0, keep_last=9, compression_level=level)
        with SnapshotStore(tensors, version=0, config=config, directory=tmp_path / str(level)) as store:
            toggle(tensors, 0.1, 1, highest_bit=1)
            wanted = bits(tensors)
            store.capture(1)
            sizes[level] = store.usage()["disk"]
            with store.at(0):
                assert not tensors["w"].any()
            assert same(tensors, wanted)
    assert sizes[3] < 0.75 * sizes[0], "values are all equal and offsets rise: a quarter at least"


def test_forgetting_a_damaged_version_lets_the_rest_live(tmp_path: Path) -> None:
    tensors, history = written(tmp_path)
    (tmp_path / "record-00000002.delta").write_bytes(b"")
    with SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path) as store:
        store.forget(2)
        assert store.versions() == [3, 4]
        with store.at(3):
            assert same(tensors, history[3])
        with pytest.raises(UnknownVersionError, match="no chain of records"):
            with store.at(0):
                pytest.fail("the block must not run")
    assert not (tmp_path / "record-00000002.delta").exists()


def full_copies(folder: Path, last: int = 3, **options: Any) -> tuple[dict[str, torch.Tensor], dict[int, Bits]]:
    """As `written`, with full copies, of which memory holds one."""
    return written(folder, last, FullCopyStore, **({"host_bytes": 9_000} | options))


def test_full_copies_survive_and_numbering_goes_on(tmp_path: Path) -> None:
    tensors, history = full_copies(tmp_path)
    with FullCopyStore(tensors, version=3, config=DISK_ONLY, directory=tmp_path) as store:
        assert store.versions() == [0, 1, 2, 3]
        for version, wanted in history.items():
            with store.at(version):
                assert same(tensors, wanted)
        toggle(tensors, 0.5, 99)
        assert store.capture(4).tier == "disk"
    with pytest.raises(DigestMismatchError, match="not version 3"):
        FullCopyStore(tensors, version=3, config=DISK_ONLY, directory=tmp_path)
    with pytest.raises(TensorSetError, match="history of other tensors"):
        SnapshotStore(tensors, version=4, config=DISK_ONLY, directory=tmp_path)


def test_full_copies_leave_the_disk_with_their_version(tmp_path: Path) -> None:
    tensors, _ = full_copies(tmp_path, last=6, keep_last=2)
    assert sorted(path.name for path in tmp_path.glob("keyframe-*")) == [
        f"keyframe-{version:08d}.delta" for version in (4, 5, 6)
    ]
    with FullCopyStore(tensors, version=6, config=DISK_ONLY, directory=tmp_path) as store:
        with pytest.raises(UnknownVersionError, match=r"version 1 is not in memory or .*copies of \[4, 5, 6\]"):
            store.check(1)


def test_a_damaged_full_copy_is_named_and_the_weights_stay(tmp_path: Path) -> None:
    tensors, history = full_copies(tmp_path)
    cut, flipped = (tmp_path / f"keyframe-0000000{version}.delta" for version in (1, 2))
    cut.write_bytes(cut.read_bytes()[:-1])
    content = bytearray(flipped.read_bytes())
    content[7_000] ^= 4
    flipped.write_bytes(content)
    with FullCopyStore(tensors, version=3, config=DISK_ONLY, directory=tmp_path) as store:
        with pytest.raises(DamagedRecordError, match="version 1 cannot be restored.*truncated"):
            store.check(1)
        for version in (1, 2):
            with pytest.raises(DamagedRecordError, match=f"keyframe-0000000{version}"), store.at(version):
                pytest.fail("the block must not run")
            assert same(tensors, history[3])
        with store.at(0):
            assert same(tensors, history[0])
        store._references = References(keep_last=1)
        assert store.collect() == [0, 2]
        assert [path.name for path in tmp_path.glob("keyframe-*")] == ["keyframe-00000003.delta"]


def test_full_copies_keep_to_the_disk_budget(tmp_path: Path) -> None:
    tensors, _ = full_copies(tmp_path, last=1)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    config = SnapshotConfig(host_bytes=0, keep_last=100, disk_bytes=size + 2_000)
    with FullCopyStore(tensors, version=1, config=config, directory=tmp_path) as store:
        wanted = bits(tensors)
        with pytest.raises(DiskFullError, match="disk budget"):
            store.capture(2)
        assert store.versions() == [0, 1]
        assert store.live_version == 1
        with store.at(0):
            pass
        assert same(tensors, wanted)
