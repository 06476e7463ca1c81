"""What processes of a run really listen on, asked of the kernel."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megatron_async.peers import PeerLink
from sglang_bridge import PublishError
from sglang_bridge.weight_group import WeightGroup, address_towards
from tests.unit.bridge_endpoint import has_ipv6

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


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_store_of_the_weights_is_on_the_address_that_it_was_given(address: str) -> None:
    if address == "::1" and not has_ipv6():
        pytest.skip("no IPv6 here")
    with begun() as found:
        group = WeightGroup(address, 2, backend="gloo", deadline_s=PATIENCE_S)
    assert found == {(address, group.port)}
    group.close()


def test_the_way_to_an_engine_decides_under_which_address_it_finds_the_weights() -> None:
    assert address_towards(["http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1"]) == "127.0.0.1"
    for version, url in ((4, "http://192.0.2.77:1"), (6, "http://[2001:db8::77]:1")):  # for documents: no machine's
        with suppress(PublishError):  # where this machine has no such network
            found = ipaddress.ip_address(address_towards([url]))
            assert found.version == version and not found.is_loopback


def test_an_engine_to_which_no_way_leads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_args: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(PublishError, match="no way leads from here to node-9, where an engine listens: .*not known"):
        address_towards(["http://node-9:1"])


def test_an_address_of_another_machine_is_refused_with_what_to_do() -> None:
    foreign = "192.0.2.77"  # for documents: no machine has it
    with begun() as found, pytest.raises(PublishError, match=f"cannot listen on {foreign}: .*give an address of this"):
        WeightGroup(foreign, 2, backend="gloo", deadline_s=PATIENCE_S)
    assert found == set()
