"""What processes of a run really listen on, asked of the kernel."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_async.peers import PeerLink
from sglang_bridge import PublishError
from sglang_bridge.weight_group import WeightGroup

PATIENCE_S = 30.0


def listening() -> set[tuple[str, int]]:
    """Addresses and ports on which this process listens."""
    found = psutil.Process().net_connections(kind="tcp")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


@contextmanager
def begun() -> Iterator[set[tuple[str, int]]]:
    """Takes in what the block began to listen on."""
    before, new = listening(), set[tuple[str, int]]()
    yield new
    new |= listening() - before


def other_interface() -> str:
    """An interface that other machines could reach; "" where there is only loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and not ipaddress.ip_address(address.address).is_loopback:
                return name
    return ""


def test_the_channel_of_a_part_beside_the_trainer_is_on_loopback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch is told of another interface, for the collectives between machines."""
    if name := other_interface():
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    links: list[PeerLink] = []
    caller = threading.Thread(target=lambda: links.append(PeerLink.call(tmp_path / "link.json", PATIENCE_S)))
    with begun() as found:
        caller.start()
        links.append(PeerLink.listen(tmp_path / "link.json", PATIENCE_S))
        caller.join(PATIENCE_S)
    assert len(links) == 2
    assert len(found) == 3  # the store, and gloo's at both ends
    assert {ip for ip, _ in found} == {"127.0.0.1"}


def test_the_store_of_the_weights_is_on_the_address_that_it_was_given() -> None:
    with begun() as found:
        group = WeightGroup("127.0.0.1", 2, backend="gloo", deadline_s=PATIENCE_S)
    assert found == {("127.0.0.1", group.port)}
    group.close()


def test_an_address_of_another_machine_is_refused_with_what_to_do() -> None:
    foreign = "192.0.2.77"  # for documents: no machine has it
    with begun() as found, pytest.raises(PublishError, match=f"cannot listen on {foreign}: .*give an address of this"):
        WeightGroup(foreign, 2, backend="gloo", deadline_s=PATIENCE_S)
    assert found == set()
