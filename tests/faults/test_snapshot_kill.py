"""kill -9 at any moment: what a capture returned for is there afterwards, bit for bit, and nothing is corrupt."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_async.snapshots import DiskFullError, SnapshotConfig, SnapshotStore
from tests.faults.snapshot_worker import (
    KEEP,
    BitsPolicy,
    advance,
    batch_of,
    logprob_under,
    score_for_ever,
    source_over,
    weights_of,
    work,
)
from tests.snapshot_support import bits, same, toggle

FORK = multiprocessing.get_context("fork")
"""A forked child needs no second import of torch, which takes longer than everything else here."""


def kill_while_working(folder: Path, host_bytes: int, captures: int, delay: float) -> int:
    """Let a worker capture `captures` versions and a moment more, kill it, and return the last version it promised."""
    ours, theirs = FORK.Pipe(duplex=False)
    worker = FORK.Process(target=work, args=(folder, host_bytes, theirs))
    worker.start()
    theirs.close()
    promised = [ours.recv() for _ in range(captures)]
    time.sleep(delay)
    worker.kill()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    while ours.poll():
        try:
            promised.append(ours.recv())
        except EOFError:
            break
    return promised[-1]


def check_history(folder: Path, promised: int) -> None:
    """Open at the promised version, and compare every version that must be there with a fresh computation."""
    tensors = weights_of(promised)
    wanted = bits(tensors)
    config = SnapshotConfig(host_bytes=0, keep_last=KEEP)
    with SnapshotStore(tensors, version=promised, config=config, directory=folder) as store:
        must = set(range(max(0, promised - KEEP + 2), promised + 1))
        assert must <= set(store.versions())
        with store.journey() as journey:
            for version in store.versions():
                journey.go(version)
                assert same(tensors, bits(weights_of(version))), version
        assert same(tensors, wanted)
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("host_bytes", [1 << 22, 30_000])
def test_killed_at_random_moments_again_and_again(tmp_path: Path, host_bytes: int) -> None:
    """Each round goes on from what the round before left, as a resumed run does."""
    moments = random.Random(host_bytes)
    promised = 0
    for _ in range(4):
        before = promised
        promised = kill_while_working(tmp_path, host_bytes, moments.randint(1, 6), moments.random() * 0.03)
        assert promised > before
        check_history(tmp_path, promised)


def capture_and_die(folder: Path, dies_at: int) -> None:
    """Capture version 3 in a process that is killed inside its n-th fsync or rename."""
    calls = 0

    def dying(real: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            nonlocal calls
            calls += 1
            if calls == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*arguments)

        return call

    tensors = weights_of(2)
    config = SnapshotConfig(host_bytes=0, keep_last=9)
    store = SnapshotStore(tensors, version=2, config=config, directory=folder)
    os.fsync, os.replace = dying(os.fsync), dying(os.replace)
    advance({name: tensor.view(torch.int16) for name, tensor in tensors.items()}, 3)
    store.capture(3)


def test_killed_inside_every_write_of_a_capture(tmp_path: Path) -> None:
    """The process dies inside its n-th fsync or rename; the version before is whole, the new one is whole or absent."""
    tensors = weights_of(1)
    config = SnapshotConfig(host_bytes=0, keep_last=9)
    with SnapshotStore(tensors, version=1, config=config, directory=tmp_path) as store:
        for name, value in weights_of(2).items():
            tensors[name].copy_(value)
        store.capture(2)
    ends = []
    for dies_at in range(1, 11):
        child = FORK.Process(target=capture_and_die, args=(tmp_path, dies_at))
        child.start()
        child.join()
        ends.append(child.exitcode)
        live = weights_of(2)
        with SnapshotStore(live, version=2, config=config, directory=tmp_path) as store:
            for version in store.versions():
                with store.at(version):
                    assert same(live, bits(weights_of(version))), (dies_at, version)
            assert {1, 2} <= set(store.versions())
            if 3 in store.versions():
                store.forget(3)
    assert ends == [-signal.SIGKILL] * 9 + [0], "six fsyncs and three renames make a capture durable"


def make_history(folder: Path, last: int) -> None:
    tensors = weights_of(0)
    config = SnapshotConfig(host_bytes=0, keep_last=KEEP)
    with SnapshotStore(tensors, version=0, config=config, directory=folder) as store:
        for version in range(1, last + 1):
            advance({name: tensor.view(torch.int16) for name, tensor in tensors.items()}, version)
            store.capture(version)


def test_killed_while_scoring_under_an_old_version(tmp_path: Path) -> None:
    """The weights of the killed process were anywhere; the next one finds every version, and the same log-probs."""
    last, moments = KEEP - 2, random.Random(3)
    make_history(tmp_path, last)
    expected = {version: logprob_under(weights_of(version)) for version in range(last + 1)}
    assert len(set(expected.values())) == last + 1
    seen = set()
    for _ in range(6):
        ours, theirs = FORK.Pipe(duplex=False)
        worker = FORK.Process(target=score_for_ever, args=(tmp_path, last, theirs))
        worker.start()
        theirs.close()
        scored = [ours.recv() for _ in range(moments.randint(1, 2 * last))]
        worker.kill()
        worker.join()
        assert worker.exitcode == -signal.SIGKILL
        seen |= set(scored)
        source = source_over(tmp_path, last)
        policy = source._policy
        assert isinstance(policy, BitsPolicy)
        batch = batch_of(range(last + 1), last)
        for sequence, values in zip(batch, source.score(batch, ["a", "b"]).values or [], strict=True):
            assert values.tolist() == [
                expected[last - gap] for gap in sequence.arrays["version_gap"].tolist()
            ]
        assert same(policy.tensors, bits(weights_of(last)))
        source.close()
    assert seen == set(expected.values()), "forwards under every version were under way when a kill came"


def test_a_file_system_that_refuses_to_grow_a_file(tmp_path: Path) -> None:
    """A real refusal by the kernel (RLIMIT_FSIZE), in the middle of a record."""
    tensors = {"w": torch.zeros(500_000, dtype=torch.bfloat16)}
    config = SnapshotConfig(host_bytes=0, keep_last=9, compression_level=0)
    with SnapshotStore(tensors, version=0, config=config, directory=tmp_path) as store:
        toggle(tensors, 0.1, 1)
        changed = bits(tensors)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(
                DiskFullError, match=r"writing record-00000001\.delta.*failed.*bytes are free"
            ):
                store.capture(1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert not list(tmp_path.glob("*.partial"))
        assert same(tensors, changed)
        store.capture(1)
        with store.at(0):
            assert not tensors["w"].any()
        assert same(tensors, changed)
