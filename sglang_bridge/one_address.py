"""Torch's key-value store on one address of this machine: by itself it listens on all of them, and asks for no key."""

from __future__ import annotations

import datetime
import socket

from torch._C._distributed_c10d import TCPStore


def listening_store(address: str, members: int, timeout: datetime.timedelta) -> TCPStore:
    """A store for ``members`` processes that listens on ``address`` alone, at a free port (``.port``).

    Raises:
        OSError: the address is not one of this machine.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        return TCPStore(
            address, port, members, is_master=True, timeout=timeout, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
