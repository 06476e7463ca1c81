"""The snapshot store: what every history of weights promises, and what each tier and reference adds."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.snapshots import (
    BudgetExceededError,
    DigestMismatchError,
    FullCopyStore,
    SnapshotBusyError,
    SnapshotConfig,
    SnapshotError,
    SnapshotStore,
    TensorSetError,
    UnknownVersionError,
    WeightHistory,
)
from tests.snapshot_support import Bits, bits, mixed_tensors, refusal, same, toggle

CONFIG = SnapshotConfig(host_bytes=64 << 20, keep_last=100, task_words=65_536)


def grow(
    store: WeightHistory, tensors: dict[str, torch.Tensor], last: int, share: float = 0.02
) -> dict[int, Bits]:
    """Capture versions up to `last`, and return the bits of each."""
    history = {store.live_version: bits(tensors)}
    for version in range(store.live_version + 1, last + 1):
        toggle(tensors, share, seed=version)
        store.capture(version)
        history[version] = bits(tensors)
    return history


def check_every_walk(
    store: WeightHistory, tensors: dict[str, torch.Tensor], history: dict[int, Bits]
) -> None:
    """Every version from every other, and back."""
    home = store.live_version
    for first in history:
        for second in history:
            with store.journey() as journey:
                journey.go(first)
                assert same(tensors, history[first]), first
                journey.go(second)
                assert same(tensors, history[second]), (first, second)
            assert store.live_version == home
            assert same(tensors, history[home]), (first, second)


FULL = {"full": (64 << 20, False), "full spilling": (900_000, True), "full on disk": (0, True)}
"""Host memory of stores of full copies, and whether there is a directory. A copy takes about 400,000 bytes."""


def build(kind: str, tensors: dict[str, torch.Tensor], folder: Path) -> SnapshotStore | FullCopyStore:
    if kind in FULL:
        size, on_disk = FULL[kind]
        config = replace(CONFIG, host_bytes=size, durable=kind != "full spilling")
        return FullCopyStore(tensors, version=0, config=config, directory=folder if on_disk else None)
    options = {
        "memory": {}, "disk only": {"host_bytes": 0}, "small memory": {"host_bytes": 60_000}, "threads": {"threads": 3},
        "keyframes": {"keyframe_every": 3}, "keyframes on disk": {"keyframe_every": 2, "host_bytes": 0},
        "packed": {"compress_in_memory": True}, "spilling": {"host_bytes": 60_000, "durable": False},
        "three tiers": {"device_bytes": 90_000, "host_bytes": 90_000, "durable": False},
    }  # fmt: skip
    values = {"host_bytes": 64 << 20, "keep_last": 100, "task_words": 65_536} | options[kind]
    directory = (
        folder
        if kind in ("disk only", "small memory", "keyframes on disk", "spilling", "three tiers")
        else None
    )
    return SnapshotStore(tensors, version=0, config=SnapshotConfig(**values), directory=directory)


KINDS = [
    "memory",
    "disk only",
    "small memory",
    "threads",
    "keyframes",
    "keyframes on disk",
    "packed",
    "spilling",
    "three tiers",
    *FULL,
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_version_from_every_other_bit_for_bit(kind: str, tmp_path: Path) -> None:
    tensors = mixed_tensors()
    store = build(kind, tensors, tmp_path)
    history = grow(store, tensors, 6)
    assert store.versions() == list(range(7))
    check_every_walk(store, tensors, history)
    store.close()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_every_density(share: float) -> None:
    tensors = mixed_tensors()
    with SnapshotStore(tensors, version=10, config=CONFIG) as store:
        history = grow(store, tensors, 14, share)
        check_every_walk(store, tensors, history)
        assert (store.digest(11) == store.digest(12)) == (share == 0.0)


class Model:
    """A store, and what it should hold, under random operations."""

    def __init__(self, folder: Path | None) -> None:
        self.tensors = {"a": torch.zeros(3_000, dtype=torch.bfloat16), "b": torch.zeros(50)}
        config = SnapshotConfig(host_bytes=6_000 if folder else 1 << 20, keep_last=1, keyframe_every=4)
        self.store = SnapshotStore(self.tensors, version=0, config=config, directory=folder)
        self.history = {0: bits(self.tensors)}
        self.needed: set[int] = set()
        self.newest = 0

    def run(self, operation: int, argument: int) -> None:
        known = sorted(self.history)
        chosen = known[argument % len(known)]
        if operation == 0:
            toggle(self.tensors, (argument % 100) / 200, argument)
            self.newest += 1 + argument % 3
            self.store.capture(self.newest)
            self.history[self.newest] = bits(self.tensors)
            self.history = {v: b for v, b in self.history.items() if v in self.store.versions()}
        elif operation == 1:
            with self.store.at(chosen):
                assert same(self.tensors, self.history[chosen])
        elif operation == 2:
            self.needed = {v for v in known if (argument >> v % 30) & 1}
            self.store.set_needed(self.needed)
        else:
            self.store.collect()
            self.history = {v: b for v, b in self.history.items() if v in self.store.versions()}
        assert self.needed <= set(self.store.versions()), "a needed version was removed"
        assert same(self.tensors, self.history[self.newest])


@given(st.booleans(), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**31)), max_size=25))
@settings(max_examples=25)
def test_random_histories(
    tmp_path_factory: pytest.TempPathFactory, on_disk: bool, steps: list[tuple[int, int]]
) -> None:
    model = Model(tmp_path_factory.mktemp("history") if on_disk else None)
    for operation, argument in steps:
        model.run(operation, argument)
    for version, wanted in model.history.items():
        with model.store.at(version):
            assert same(model.tensors, wanted)
    model.store.close()


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return mixed_tensors()


@pytest.fixture
def store(tensors: dict[str, torch.Tensor]) -> Iterator[SnapshotStore]:
    with SnapshotStore(tensors, version=0, config=CONFIG) as opened:
        yield opened


def test_a_version_that_is_not_there_raises_and_copies_nothing(
    store: SnapshotStore, tensors: dict[str, torch.Tensor]
) -> None:
    """Field bug 8."""
    history = grow(store, tensors, 2)
    with pytest.raises(UnknownVersionError, match=r"version 7 is not in the store.*\[0, 1, 2\].*[Rr]etain"):
        with store.at(7):
            pytest.fail("the block must not run")
    assert same(tensors, history[2])


def test_weights_changed_without_capture_are_noticed_and_left_alone(
    store: SnapshotStore, tensors: dict[str, torch.Tensor]
) -> None:
    grow(store, tensors, 2)
    tensors["half"][3] += 1
    changed = bits(tensors)
    with pytest.raises(DigestMismatchError, match="no longer version 2: tensor 'half'"):
        with store.at(1):
            pytest.fail("the block must not run")
    assert same(tensors, changed)


def test_permuted_weights_are_noticed(store: SnapshotStore, tensors: dict[str, torch.Tensor]) -> None:
    """Field bug 9. Two rows trade places: every sum of the values is the same."""
    grow(store, tensors, 1)
    tensors["embedding"][[0, 9]] = tensors["embedding"][[9, 0]]
    with pytest.raises(DigestMismatchError, match="'embedding'"):
        with store.at(0):
            pytest.fail("the block must not run")


def test_weights_written_inside_the_block_are_put_back_and_reported(
    store: SnapshotStore, tensors: dict[str, torch.Tensor]
) -> None:
    history = grow(store, tensors, 3)
    with pytest.raises(DigestMismatchError, match="was written after"):
        with store.at(1):
            tensors["embedding"].zero_()
    assert store.live_version == 3
    assert same(tensors, history[3])


def test_an_error_in_the_block_comes_back_first(
    store: SnapshotStore, tensors: dict[str, torch.Tensor]
) -> None:
    history = grow(store, tensors, 2)
    with pytest.raises(ZeroDivisionError):
        with store.at(0):
            raise ZeroDivisionError
    assert same(tensors, history[2])


def test_a_damaged_record_in_memory_is_noticed_and_taken_back(
    store: SnapshotStore, tensors: dict[str, torch.Tensor]
) -> None:
    history = grow(store, tensors, 3)
    record = store._ledger.nodes[2].record
    assert record is not None
    stored = next(iter(record.stored.values()))
    stored.block.data[-64:] ^= 1
    with pytest.raises(DigestMismatchError, match="from version 3 to version 1 do not lead to its bits"):
        with store.at(1):
            pytest.fail("the block must not run")
    assert same(tensors, history[3])
    with store.at(2):
        assert same(tensors, history[2])


def test_replaced_tensor_data_is_noticed(store: SnapshotStore, tensors: dict[str, torch.Tensor]) -> None:
    tensors["half"].data = tensors["half"].clone()
    with pytest.raises(TensorSetError, match="'half' was replaced"):
        store.capture(1)


def test_numbers_are_used_once_and_parents_are_the_live_version(
    store: SnapshotStore, tensors: dict[str, torch.Tensor]
) -> None:
    grow(store, tensors, 2)
    with pytest.raises(SnapshotError, match="version 1 was captured before"):
        store.capture(1)
    with pytest.raises(SnapshotError, match="came from version 2, not from the given parent 1"):
        store.capture(3, parent=1)
    assert store.capture(9, parent=2).parent == 2


def test_no_capture_while_away(store: SnapshotStore, tensors: dict[str, torch.Tensor]) -> None:
    history = grow(store, tensors, 2)
    with store.at(1):
        for call in (
            lambda: store.capture(3),
            store.collect,
            store.keyframe,
            lambda: store.capture_in_background(3),
        ):
            with pytest.raises(SnapshotBusyError, match="weights are at version 1"):
                call()
        with store.at(0):
            assert same(tensors, history[0])
        assert same(tensors, history[1])
    assert same(tensors, history[2])


def test_another_thread_waits_its_turn_and_not_for_ever(tensors: dict[str, torch.Tensor]) -> None:
    config = SnapshotConfig(host_bytes=1 << 24, keep_last=9, deadline_s=0.2)
    with SnapshotStore(tensors, version=0, config=config) as store:
        grow(store, tensors, 1)
        errors: list[BaseException] = []

        def visit() -> None:
            try:
                with store.at(0):
                    pass
            except SnapshotBusyError as error:
                errors.append(error)

        with store.at(0):
            thread = threading.Thread(target=visit)
            thread.start()
            thread.join()
        assert "another thread has used the weights for 0.2 s" in str(errors[0])
        visit()
        assert len(errors) == 1, "the weights are free again"


def test_many_threads_travel_without_meeting(store: SnapshotStore, tensors: dict[str, torch.Tensor]) -> None:
    history = grow(store, tensors, 4)
    wrong: list[int] = []

    def travel(seed: int) -> None:
        for turn in range(15):
            version = (seed * 7 + turn) % 5
            with store.at(version):
                if not same(tensors, history[version]):
                    wrong.append(version)

    threads = [threading.Thread(target=travel, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert same(tensors, history[4])


def test_capture_in_the_background_is_awaited_and_its_errors_are_raised(
    store: SnapshotStore, tensors: dict[str, torch.Tensor]
) -> None:
    history = grow(store, tensors, 1)
    toggle(tensors, 0.1, 99)
    history[2] = bits(tensors)
    store.capture_in_background(2)
    with store.at(1):
        assert same(tensors, history[1])
    assert store.live_version == 2
    store.capture_in_background(2)
    with pytest.raises(SnapshotError, match="version 2 was captured before"):
        store.settle()
    assert store.settle() is None


def test_needed_versions_stay_and_the_rest_goes(tensors: dict[str, torch.Tensor]) -> None:
    config = SnapshotConfig(host_bytes=1 << 24, keep_last=2)
    with SnapshotStore(tensors, version=0, config=config) as store:
        grow(store, tensors, 2)
        store.retain(1)
        grow(store, tensors, 6)
        assert store.versions() == [1, 2, 3, 4, 5, 6]
        store.retain(4)
        store.release(1)
        store.set_needed([5])
        assert store.collect() == [1, 2, 3]
        store.release(4)
        assert store.collect() == [4]
        with pytest.raises(SnapshotError, match="released more often"):
            store.release(4)
        with pytest.raises(UnknownVersionError, match="version 4"):
            store.set_needed([4, 5])
        store.set_needed([])
        grow(store, tensors, 8)
        assert store.versions() == [6, 7, 8], "7 and 8 are the newest, 6 was when 8 was captured"
        assert store.collect() == [6]


def test_a_full_budget_refuses_with_the_arithmetic_and_goes_on_after_a_release(
    tensors: dict[str, torch.Tensor],
) -> None:
    config = SnapshotConfig(host_bytes=60_000, keep_last=1)
    with SnapshotStore(tensors, version=0, config=config) as store:
        store.retain(0)
        history, version = {0: bits(tensors)}, 0
        error = None
        while error is None and version < 20:
            toggle(tensors, 0.01, version)
            error = refusal(store, version + 1)
            if error is None:
                version += 1
                history[version] = bits(tensors)
        assert isinstance(error, BudgetExceededError)
        assert re.search(r"host [\d,]+ of 60,000 bytes used.*version 1 [\d,]+", str(error))
        refused = bits(tensors)
        assert 1 <= version < 20
        assert store.live_version == version, "the refused version does not exist"
        assert store.usage()["host"] <= 60_000
        with pytest.raises(DigestMismatchError, match=f"no longer version {version}"):
            with store.at(0):
                pytest.fail("the live weights are a version that was not recorded")
        assert same(tensors, refused)
        store.release(0)
        store.capture(version + 1)
        with store.at(version):
            assert same(tensors, history[version])
        assert same(tensors, refused)


def test_old_records_move_to_disk_before_anything_is_refused(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    config = SnapshotConfig(host_bytes=200_000, keep_last=50, durable=False)
    with SnapshotStore(tensors, version=0, config=config, directory=tmp_path) as store:
        history = grow(store, tensors, 12)
        assert store.usage()["host"] <= 200_000
        files = sorted(path.name for path in tmp_path.glob("record-*.delta"))
        assert files[0] == "record-00000001.delta", "the oldest moves first"
        assert len(files) < 12, "the newest stay in memory"
        check_every_walk(store, tensors, {version: history[version] for version in (0, 5, 12)})


def test_keyframes_bridge_a_forgotten_version(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    config = SnapshotConfig(host_bytes=0, keep_last=50, keyframe_every=3)
    with SnapshotStore(tensors, version=0, config=config, directory=tmp_path) as store:
        history = grow(store, tensors, 8)
        store.forget(5)
        assert store.versions() == [0, 1, 2, 3, 4, 6, 7, 8]
        with store.at(2):
            assert same(tensors, history[2])
        assert same(tensors, history[8])
        with pytest.raises(UnknownVersionError, match="version 5"):
            with store.at(5):
                pytest.fail("the block must not run")
        with pytest.raises(SnapshotError, match="version 8 is live"):
            store.forget(8)


def test_without_keyframes_a_gap_cannot_be_crossed(
    store: SnapshotStore, tensors: dict[str, torch.Tensor]
) -> None:
    history = grow(store, tensors, 5)
    store.forget(3)
    assert store.versions() == [4, 5]
    with pytest.raises(UnknownVersionError, match="no chain of records leads from version 5 to version 1"):
        with store.at(1):
            pytest.fail("the block must not run")
    assert same(tensors, history[5])


def test_a_walk_home_over_dense_records_uses_the_shadow_copy(
    store: SnapshotStore, tensors: dict[str, torch.Tensor]
) -> None:
    history = grow(store, tensors, 6, share=0.9)
    with store.journey() as journey:
        for version in range(6, -1, -1):
            journey.go(version)
            assert same(tensors, history[version])
        assert journey.report.steps == 6
        assert journey.report.visited == [6, 5, 4, 3, 2, 1, 0]
        steps = store._ledger.plan(0, 6, store._copy_of())
        assert steps is not None
        assert [step.absolute for step in steps] == [True]
    assert same(tensors, history[6])


def test_full_copies_refuse_by_budget_and_report_damage() -> None:
    tensors = {"w": torch.arange(1_000, dtype=torch.float32)}
    store = FullCopyStore(tensors, version=0, config=SnapshotConfig(host_bytes=9_000, keep_last=1))
    store.retain(0)
    tensors["w"] += 1
    store.capture(1)
    tensors["w"] += 1
    store.set_needed([1])
    with pytest.raises(BudgetExceededError, match=r"4,000 bytes does not fit.*versions \[0, 1\]"):
        store.capture(2)
    tensors["w"] -= 1
    wanted = bits(tensors)
    blocks = store._copies[0].blocks
    assert blocks is not None
    blocks[0].data[5] ^= 1
    with pytest.raises(DigestMismatchError, match="copy of version 0 is damaged"):
        with store.at(0):
            pytest.fail("the block must not run")
    assert same(tensors, wanted)
    assert store.usage() == {"host": 2 * 4_032, "disk": 0}
    store.close()


def test_memory_is_flat_over_five_hundred_captures() -> None:
    """Field bug 10. Records of removed versions are reused; the process does not grow by as much as twenty of them."""
    import psutil

    tensors = {"w": torch.zeros(150_000, dtype=torch.bfloat16)}
    config = SnapshotConfig(host_bytes=1 << 20, keep_last=4)
    process = psutil.Process()
    with SnapshotStore(tensors, version=0, config=config) as store:
        resident = 0
        for version in range(1, 501):
            toggle(tensors, 0.02, version)
            store.capture(version)
            with store.at(version - 1):
                pass
            if version == 50:
                resident, used = process.memory_info().rss, store.usage()["host"]
        grown = process.memory_info().rss - resident
        assert store.usage()["host"] < 1.2 * used
        assert grown < 20 * 18_000, f"{grown:,} bytes more after 450 captures of 18,000 bytes each"
        assert len(store.versions()) <= 5


def test_reports_say_what_changed() -> None:
    tensors = {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    with SnapshotStore(tensors, version=0, config=CONFIG) as store:
        tensors["w"][::100] = 1
        report = store.capture(1)
        assert report.changed == pytest.approx(0.01, rel=0.01)
        assert (report.version, report.parent, report.tier) == (1, 0, "host")
        assert report.nbytes < 1.01 * 4 * (1 << 20) / 100, (
            "the high byte changes: two bytes of offset, two of value"
        )
        with store.at(0) as travel:
            time.sleep(0)
        assert travel.steps == 1
        assert travel.seconds > 0 < travel.return_seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "maybe"}, "'maybe'"),
        ({"host_bytes": -1}, "host_bytes is -1"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_senseless_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        SnapshotConfig(**({"host_bytes": 0} | options))  # type: ignore[arg-type]


def test_records_go_down_the_tiers_oldest_first(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    config = SnapshotConfig(device_bytes=90_000, host_bytes=90_000, keep_last=99, durable=False)
    with SnapshotStore(tensors, version=0, config=config, directory=tmp_path) as store:
        grow(store, tensors, 8)
        records = [store._ledger.nodes[version].record for version in range(1, 9)]
        places = ["disk" if r is None or r.tier is None else r.tier.name for r in records]
        assert places == sorted(places, key=["disk", "host", "device"].index)
        assert set(places) == {"disk", "host", "device"}
        usage = store.usage()
        assert 0 < usage["device"] <= 90_000
        assert 0 < usage["host"] <= 90_000
