"""An engine that fails while it is updated, run as a process: ``python -m tests.live.failing_peer SCRIPT``.

SCRIPT ``absent`` never joins the process group; ``dies`` joins it and ends at the first bucket; ``frozen`` joins it
and never answers again. Prints its port. It speaks just enough of SGLang's control API for a ``Publisher``.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
from typing import Any

import torch.distributed as dist
from aiohttp import web
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d


def join(body: dict[str, Any]) -> object:
    """Become a member of the publisher's group, as SGLang does."""
    timeout = datetime.timedelta(seconds=60)
    store = TCPStore(body["master_address"], body["master_port"], body["world_size"], is_master=False, timeout=timeout)
    group, _ = c10d._new_process_group_helper(
        body["world_size"], body["rank_offset"], [], dist.Backend("gloo"), PrefixStore(body["group_name"], store),
        group_name=body["group_name"], timeout=timeout,
    )
    return group


class FailingPeer:
    """The scripted control API."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.groups: list[object] = []

    async def handle(self, request: web.Request) -> web.Response:
        """Any endpoint."""
        if request.path == "/init_weights_update_group":
            if self.script == "absent":
                await asyncio.sleep(600)
            self.groups.append(await asyncio.to_thread(join, await request.json()))
        if request.path == "/update_weights_from_distributed":
            if self.script == "dies":
                os._exit(1)
            await asyncio.sleep(600)
        return web.json_response({"success": True, "tp_size": 1, "device": "cpu"})


async def main(script: str) -> None:
    """Serve until killed."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", FailingPeer(script).handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
