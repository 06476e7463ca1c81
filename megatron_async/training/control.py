"""Control messages between trainer ranks: bytes from rank 0 to all, errors included.

Invariant: what goes wrong on rank 0 is raised on every rank, so that no rank is left waiting in a collective.
Messages are raw bytes or JSON; nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.errors import PartnerGone, UserError

MARGIN_S = 120.0
"""How much longer the other ranks wait for rank 0 than it may itself wait for anything."""

_OK, _USER_ERROR, _PARTNER_GONE, _ERROR = 0, 1, 2, 3


class RankZeroError(RuntimeError):
    """Rank 0 failed while the others waited for it; the message is rank 0's."""


_KINDS: dict[int, type[Exception]] = {_USER_ERROR: UserError, _PARTNER_GONE: PartnerGone, _ERROR: RankZeroError}
"""What is raised on the other ranks."""


def _status(error: Exception) -> int:
    if isinstance(error, PartnerGone):
        return _PARTNER_GONE
    return _USER_ERROR if isinstance(error, UserError) else _ERROR


class Control:
    """A gloo group over all trainer ranks for small host-side messages (also when training itself uses NCCL).

    timeout_s: longest time a rank waits for rank 0; must exceed rank 0's own longest wait.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def from_rank_zero(self, produce: Callable[[], bytes]) -> bytes:
        """Run `produce` on rank 0 and return its bytes on every rank; an exception becomes one on every rank."""
        status, payload, failure = _OK, b"", None
        if self.rank == 0:
            try:
                payload = produce()
            except Exception as error:  # noqa: BLE001 - raised below, once the other ranks have heard of it
                failure = error
                status = _status(error)
                payload = f"{type(error).__name__}: {error}".encode()
        header = torch.tensor([status, len(payload)], dtype=torch.int64)
        dist.broadcast(header, 0, group=self._group)
        body = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)
        if self.rank != 0:
            body = torch.empty(max(int(header[1]), 1), dtype=torch.uint8)
        dist.broadcast(body, 0, group=self._group)
        if failure is not None:
            raise failure
        received = body.numpy().tobytes()[: int(header[1])]
        if int(header[0]) != _OK:
            raise _KINDS[int(header[0])](received.decode())
        return received

    def json_from_rank_zero(self, produce: Callable[[], Any]) -> Any:
        """As `from_rank_zero`, for a JSON value."""
        return json.loads(self.from_rank_zero(lambda: json.dumps(produce()).encode()))

    def barrier(self) -> None:
        dist.barrier(group=self._group)
