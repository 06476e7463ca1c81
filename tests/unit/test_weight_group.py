"""The group that weights travel over: whoever leaves it leaves nobody waiting in it."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from sglang_bridge.weight_group import WeightGroup

PEER_PATIENCE = datetime.timedelta(seconds=120)


def receive_twice(port: int, name: str) -> None:
    """A peer that waits for one tensor more than it gets; ends with 0 when the connection breaks.

    At once: torch's threads may abort an interpreter that ends while they run.
    """
    store = TCPStore("127.0.0.1", port, 2, is_master=False, timeout=PEER_PATIENCE)
    group, _ = c10d._new_process_group_helper(
        2, 1, [], dist.Backend("gloo"), PrefixStore(name, store), group_name=c10d.GroupName(name), timeout=PEER_PATIENCE
    )
    group.broadcast(torch.zeros(4), 0).wait()
    try:
        group.broadcast(torch.zeros(4), 0).wait()
    except RuntimeError:
        os._exit(0)
    os._exit(3)  # got a tensor that nobody sent


def test_a_peer_that_waits_sees_the_publisher_leave_whatever_its_caller_still_holds() -> None:
    group = WeightGroup("127.0.0.1", 2, backend="gloo", deadline_s=60)
    peer = multiprocessing.get_context("spawn").Process(target=receive_twice, args=(group.port, group.name))
    peer.start()
    try:
        group.join()
        held = group.broadcast(torch.ones(4))  # a traceback holds what its frames hold
        while not group.sent():
            time.sleep(0.01)
        group.close()
        peer.join(30)  # far below the peer's own patience
        assert peer.exitcode == 0, "the peer still waits"
        assert held is None
    finally:
        peer.kill()
