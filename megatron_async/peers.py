"""A channel for bytes between one trainer rank and one rank of a part that runs beside the trainer.

Invariants: messages arrive whole and in order; a peer that is gone, or silent beyond the deadline, raises. Both run on
one machine: the trainer rank listens on loopback, and leaves the port in the run's folder. No other machine may reach
the channel, which asks nobody who he is.
"""

from __future__ import annotations

import json
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from megatron_async.errors import PartnerGone
from megatron_async.snapshots.bits import words_of
from sglang_bridge.one_address import listening_store

T = TypeVar("T")

END = b""
"""The message after the last one."""
_HOST = "127.0.0.1"
_LOOK_S = 0.05
_JOIN_S = 10.0
_LISTENER, _CALLER = 0, 1
_CONNECT = timedelta(seconds=3)
_SILENCE = timedelta(days=1)
"""A peer that died breaks the connection at once; this ends the wait for one that hangs."""


def _reached(file: Path) -> TCPStore | None:
    """The listener's store; None while there is no port, or one that a run before this one left."""
    if not file.exists():
        return None
    address = json.loads(file.read_text())
    try:
        return TCPStore(_HOST, address["port"], 2, is_master=False, timeout=_CONNECT)
    except RuntimeError:  # torch's DistError is one
        return None


class PeerMissing(PartnerGone):
    """The other side did not come in time."""


class PeerGone(PartnerGone):
    """The other side ended, or broke the connection, before it had said that it would send no more."""


class PeerLink:
    """One end of the channel; `send` and `receive` block, each from one thread at a time."""

    def __init__(self, store: TCPStore, end: int, timeout: timedelta) -> None:
        self._store = store
        self._other = 1 - end
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack the options
        options = gloo._Options()
        options._timeout = timeout
        # Its own choice would be the address of the machine's name, or of GLOO_SOCKET_IFNAME.
        options._devices = [gloo.create_device(hostname=_HOST)]
        self._group = gloo(PrefixStore("peer", store), end, 2, options)
        self._group._set_default_timeout(_SILENCE)

    @classmethod
    def listen(cls, file: Path, deadline_s: float) -> PeerLink:
        """Wait for the caller. file: where the port is left.

        Raises PeerMissing after `deadline_s` seconds.
        """
        timeout = timedelta(seconds=deadline_s)
        store = listening_store(_HOST, 2, timeout)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"port": store.port}))
        partial.replace(file)
        return cls._met(store, _LISTENER, timeout, str(file))

    @classmethod
    def call(cls, file: Path, deadline_s: float) -> PeerLink:
        """Meet the listener that left its port in `file`. Raises PeerMissing after `deadline_s` seconds."""
        started, timeout = time.monotonic(), timedelta(seconds=deadline_s)
        while (store := _reached(file)) is None:
            if time.monotonic() - started > deadline_s:
                raise PeerMissing(f"no trainer rank left its port in {file} within {deadline_s:g} s")
            time.sleep(_LOOK_S)
        return cls._met(store, _CALLER, timeout, str(file))

    @classmethod
    def _met(cls, store: TCPStore, end: int, timeout: timedelta, name: str) -> PeerLink:
        try:
            return cls(store, end, timeout)
        except RuntimeError as error:  # torch's DistError is one
            raise PeerMissing(
                f"the peer of {name} did not come within {timeout.total_seconds():g} s"
            ) from error

    def send_weights(self, version: int, tensors: Iterable[Tensor]) -> None:
        """Send a version number and the bits of its tensors; none of them for version 0, which both sides have."""
        self.send(struct.pack("<q", version))
        for tensor in tensors if version > 0 else ():
            self.send(words_of(tensor).cpu().numpy().tobytes())

    @torch.no_grad()
    def receive_weights(self, tensors: Iterable[Tensor]) -> int:
        """Take in what `send_weights` sends, into tensors of the same shapes; returns the version."""
        (version,) = struct.unpack("<q", self.receive())
        for tensor in tensors if version > 0 else ():
            words, data = words_of(tensor), self.receive()
            if data:
                words.copy_(torch.frombuffer(bytearray(data), dtype=words.dtype))
        return int(version)

    def send(self, data: bytes, deadline_s: float = _SILENCE.total_seconds()) -> None:
        """Send one message. Raises PeerGone when the peer is gone, or takes nothing in for `deadline_s` seconds."""
        timeout = timedelta(seconds=deadline_s)
        self._pass(self._group.send, torch.tensor([len(data)], dtype=torch.int64), timeout)
        if data:
            self._pass(self._group.send, torch.frombuffer(bytearray(data), dtype=torch.uint8), timeout)

    def receive(self, deadline_s: float = _SILENCE.total_seconds()) -> bytes:
        """The next message. Raises PeerGone when the peer is gone, or silent for `deadline_s` seconds."""
        timeout = timedelta(seconds=deadline_s)
        header = torch.empty(1, dtype=torch.int64)
        self._pass(self._group.recv, header, timeout)
        body = torch.empty(int(header[0]), dtype=torch.uint8)
        if body.numel():
            self._pass(self._group.recv, body, timeout)
        return body.numpy().tobytes()

    def _pass(self, operation: Callable[..., Any], tensor: Tensor, timeout: timedelta) -> None:
        try:
            operation([tensor], self._other, 0).wait(timeout)
        except RuntimeError as error:  # what gloo raises for a broken connection and for silence
            raise PeerGone(f"the peer is gone, or silent for {timeout.total_seconds():g} s: {error}") from error


class Inbox(Generic[T]):
    """Takes in what the peer sends, in a thread of its own, while this rank computes; ends with the message `END`.

    decode: makes the messages what `take` returns, in that thread.
    """

    def __init__(self, link: PeerLink, decode: Callable[[bytes], T]) -> None:
        self._link = link
        self._decode = decode
        self._queue: queue.Queue[T | Exception] = queue.Queue()
        self.ended_at: float | None = None
        """When the peer said that it sends no more (time.monotonic), or None."""
        self._thread = threading.Thread(target=self._receive, name="peer-inbox", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        try:
            while (message := self._link.receive()) != END:
                self._queue.put(self._decode(message))
            self.ended_at = time.monotonic()
        except Exception as error:  # noqa: BLE001 - handed to the thread that works, which raises it
            self._queue.put(error)

    @property
    def empty(self) -> bool:
        """Whether `take` would wait."""
        return self._queue.empty()

    def take(self, wait_s: float) -> T | None:
        """The next message; None when there is none within `wait_s` seconds.

        Raises PeerGone, and what `decode` raises.
        """
        try:
            found = self._queue.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """Wait for the thread of a peer that has ended."""
        self._thread.join(_JOIN_S)
