"""Steps of the history that another holder of the weights takes, and the channel they travel through."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron_async.peers import PeerLink, PeerMissing
from megatron_async.snapshots import DamagedRecordError, SnapshotConfig, SnapshotError, SnapshotStore
from megatron_async.snapshots.transfer import Follower, VersionStep, read_step
from tests.snapshot_support import bits, mixed_tensors, same, toggle

SETTINGS = SnapshotConfig(host_bytes=1 << 22, keep_last=8)


def made(
    tmp_path: Path,
) -> tuple[dict[str, torch.Tensor], SnapshotStore, list[VersionStep], list[dict[str, torch.Tensor]]]:
    """A durable store that captured three versions, its steps, and the bits of every version."""
    tensors = mixed_tensors()
    store = SnapshotStore(tensors, version=0, config=SETTINGS, directory=tmp_path / "history")
    seen, steps = [bits(tensors)], []
    for version, share in ((1, 0.02), (2, 0.5), (3, 0.0)):
        toggle(tensors, share, seed=version)
        store.capture(version)
        steps.append(
            VersionStep.from_bytes(read_step(store, tmp_path / "history", version, version - 1).to_bytes())
        )
        seen.append(bits(tensors))
    return tensors, store, steps, seen


def test_a_follower_ends_with_the_same_bits_and_can_go_back(tmp_path: Path) -> None:
    _, store, steps, seen = made(tmp_path)
    tensors = mixed_tensors()
    with store, SnapshotStore(tensors, version=0, config=SETTINGS) as other:
        follower = Follower(other, tensors, tmp_path / "scratch")
        for version, step in enumerate(steps, start=1):
            follower.take(step)
            assert same(tensors, seen[version])
            assert other.digest(version) == store.digest(version)
        with other.at(1):
            assert same(tensors, seen[1])
        assert same(tensors, seen[3])


def test_steps_out_of_order_or_damaged_change_nothing(tmp_path: Path) -> None:
    _, store, steps, seen = made(tmp_path)
    tensors = mixed_tensors()
    with store, SnapshotStore(tensors, version=0, config=SETTINGS) as other:
        follower = Follower(other, tensors, tmp_path / "scratch")
        with pytest.raises(SnapshotError, match="starts at version 1, but the weights are at 0"):
            follower.take(steps[1])
        damaged = bytearray(steps[0].record)
        damaged[len(damaged) // 2] ^= 1
        with pytest.raises(DamagedRecordError):
            follower.take(VersionStep(1, 0, steps[0].digest, bytes(damaged)))
        with pytest.raises(DamagedRecordError, match="arrived damaged"):
            VersionStep.from_bytes(b"\x01")
        assert same(tensors, seen[0])
        follower.take(steps[0])
        assert same(tensors, seen[1])


def test_weights_that_differ_at_the_sender_are_found(tmp_path: Path) -> None:
    _, store, steps, _ = made(tmp_path)
    tensors = mixed_tensors(seed=1)
    with store, SnapshotStore(tensors, version=0, config=SETTINGS) as other:
        with pytest.raises(SnapshotError, match="version 1 arrived with other bits"):
            Follower(other, tensors, tmp_path / "scratch").take(steps[0])


def test_messages_arrive_whole_and_in_order(tmp_path: Path) -> None:
    file, sent = tmp_path / "link" / "rank_0.json", [b"", b"x", bytes(range(256)) * 5000]
    received: list[bytes] = []

    def caller() -> None:
        link = PeerLink.call(file, 20.0)
        received.extend(link.receive() for _ in sent)
        link.send(b"done")

    thread = threading.Thread(target=caller)
    thread.start()
    link = PeerLink.listen(file, 20.0)
    for message in sent:
        link.send(message)
    assert link.receive() == b"done"
    thread.join(10.0)
    assert received == sent


def test_a_peer_that_never_comes_raises_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(PeerMissing, match=r"rank_0.json within 0.2 s"):
        PeerLink.call(tmp_path / "rank_0.json", 0.2)
    with pytest.raises(PeerMissing, match="did not come within 1 s"):
        PeerLink.listen(tmp_path / "rank_1.json", 1.0)


def test_an_address_left_by_a_run_before_is_not_trusted(tmp_path: Path) -> None:
    """The caller finds a stale address, on which nobody listens, and meets the listener once it is there."""
    file = tmp_path / "rank_0.json"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    file.write_text(json.dumps({"port": port}))
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(PeerLink.call(file, 30.0).receive()))
    thread.start()
    time.sleep(0.2)
    link = PeerLink.listen(file, 30.0)
    link.send(b"here")
    thread.join(20.0)
    assert received == [b"here"]


def test_weights_travel_bit_for_bit(tmp_path: Path) -> None:
    sent, arrived = mixed_tensors(), mixed_tensors(seed=3)
    versions: list[int] = []

    def caller() -> None:
        link = PeerLink.call(tmp_path / "rank_0.json", 20.0)
        versions.extend(link.receive_weights(arrived.values()) for _ in range(2))

    thread = threading.Thread(target=caller)
    thread.start()
    link = PeerLink.listen(tmp_path / "rank_0.json", 20.0)
    link.send_weights(0, sent.values())
    link.send_weights(7, sent.values())
    thread.join(20.0)
    assert versions == [0, 7]
    assert same(arrived, bits(sent))
