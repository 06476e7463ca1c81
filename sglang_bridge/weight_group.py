"""The process group weights travel over: the publisher is rank 0, the engines' processes follow.

The group is apart from whatever group the trainer itself runs in. Each connection gets its own store and name, so
a group that broke is never reused. SGLang joins with torch's own helper for extra groups; both ends must call the
same one, since it decides under which keys the members find each other.
"""

from __future__ import annotations

import datetime
import socket
import uuid
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from sglang_bridge.addresses import is_loopback
from sglang_bridge.errors import PublishError
from sglang_bridge.one_address import listening_store


class WeightGroup:
    """Rank 0 of a group of ``world_size``; ``join`` blocks until every peer came, or the deadline passed.

    ``address`` and ``port`` are where the peers find the store; ``name`` is the group's.
    """

    def __init__(self, address: str, world_size: int, *, backend: str, deadline_s: float) -> None:
        self.address = address
        self.world_size = world_size
        self.backend = backend
        self.name = f"publish-{uuid.uuid4().hex[:12]}"
        self._timeout = datetime.timedelta(seconds=deadline_s)
        self._store: TCPStore | None = _store_on(address, world_size, self._timeout)
        self.port = self._store.port
        self._group: dist.ProcessGroup | None = None
        self._sending: dist.Work | None = None

    @property
    def device(self) -> torch.device:
        """Where tensors must lie to be sent."""
        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")

    def join(self) -> None:
        """Meet the peers. Raises torch's ``DistError`` (a ``RuntimeError``) when one is missing at the deadline."""
        if self._store is None:
            raise RuntimeError("join after close")
        group, _ = c10d._new_process_group_helper(
            self.world_size, 0, [], dist.Backend(self.backend), PrefixStore(self.name, self._store),
            group_name=c10d.GroupName(self.name), timeout=self._timeout,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        self._group = group

    def missing_ranks(self) -> list[int]:
        """Peers that never came to the store (gloo members leave their address there before they connect)."""
        if self._store is None or self.backend != "gloo":
            return []
        here = {key.rsplit("/", 1)[-1] for key in self._store.list_keys()}
        return [rank for rank in range(1, self.world_size) if str(rank) not in here]

    def broadcast(self, tensor: Tensor) -> None:
        """Begin sending ``tensor`` to every peer; the one before must have been ``sent``.

        Torch's handle stays in here: whoever held one, be it by the traceback of an error, would keep the connections
        open after ``close``, and peers waiting in them.
        """
        if self._group is None:
            raise RuntimeError("broadcast before join")
        self._sending = self._group.broadcast(tensor, 0)

    def sent(self) -> bool:
        """Whether every peer was served; raises torch's ``DistError`` (a ``RuntimeError``) when one was not."""
        if self._sending is None or not self._sending.is_completed():
            return self._sending is None
        try:
            self._sending.wait()
        finally:
            self._sending = None
        return True

    def close(self) -> None:
        """Leave the group. Peers that still wait in it see the connection break."""
        group, self._group, self._store, self._sending = self._group, None, None, None
        if group is not None:
            dist.destroy_process_group(group)


def _store_on(address: str, world_size: int, timeout: datetime.timedelta) -> TCPStore:
    try:
        return listening_store(address, world_size, timeout)
    except OSError as error:
        raise PublishError(f"the publisher cannot listen on {address}: {error.strerror}; give an address of this "
                           "machine that the engines reach") from error


def address_towards(urls: list[str]) -> str:
    """The address of this machine under which the engines at ``urls`` can reach it.

    Raises:
        PublishError: there is none.
    """
    hosts = [urlsplit(url).hostname or "127.0.0.1" for url in urls]
    remote = [host for host in hosts if not is_loopback(host)]
    if not remote:
        return "127.0.0.1"
    try:
        family, kind, _, _, place = socket.getaddrinfo(remote[0], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing: it only asks which interface leads there
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PublishError(f"no way leads from here to {remote[0]}, where an engine listens: {error}; give the "
                           "publisher an address of this machine that the engines reach") from error
