"""The engines of a run as the rollout sees them: their addresses, a pool of clients, and the version they sample with.

Invariant: `EngineVersions.version` is never above the version that any healthy engine samples with.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from sglang_bridge import EngineError, EnginePool

_QUERY_S = 2.0


def engine_urls(run_path: Path) -> list[str]:
    """Addresses in `engines.json` of a run's folder. Raises UserError when there are none."""
    path = run_path / "engines.json"
    if not path.exists():
        raise UserError(f"{path} is missing: start the run with `launch`, or its engines with `serve`, first")
    urls = [str(engine["url"]) for engine in json.loads(path.read_text())["engines"]]
    if not urls:
        raise UserError(f"{path} lists no engine")
    return urls


def build_pool(config: RunConfig, urls: list[str]) -> EnginePool:
    """A pool of clients that know the model's vocabulary and, when they are recorded, its routed experts."""
    model = json.loads((Path(config.model.path) / "config.json").read_text())
    shape = (moe_layers(model), int(model["num_experts_per_tok"])) if config.engines.routed_experts else None
    return EnginePool(
        urls,
        stall_s=config.rollout.turn_deadline_s,
        vocab_size=int(model["vocab_size"]),
        routed_experts_shape=shape,
    )


def moe_layers(model: dict[str, Any]) -> int:
    """Number of layers with routed experts in a Hugging Face Qwen3-MoE configuration; 0 for a dense model."""
    if not model.get("num_experts"):
        return 0
    dense, step = set(model.get("mlp_only_layers") or ()), int(model.get("decoder_sparse_step") or 1)
    return sum(i not in dense and (i + 1) % step == 0 for i in range(int(model["num_hidden_layers"])))


class EngineVersions:
    """The oldest version that the healthy engines sample with; asked again only while it is not the newest."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.version: int | None = None
        self.problem = ""

    async def refresh(self, newest: int) -> int | None:
        """Ask the engines unless they are known to have `newest`; None until they have answered once.

        An engine that does not answer within two seconds leaves the version as it was and is named in `problem`.
        """
        if self.version == newest:
            return self.version
        healthy = set(self._pool.healthy_urls)
        clients = [client for client in self._pool.clients if client.url in healthy]
        try:
            async with asyncio.timeout(_QUERY_S):
                answers = await asyncio.gather(*(client.version() for client in clients))
        except (EngineError, TimeoutError) as error:
            self.problem = str(error) or f"no answer from {', '.join(sorted(healthy))} in {_QUERY_S:g} s"
            return self.version
        self.problem = "" if answers else "no engine is healthy"
        self.version = min(answers, default=self.version)
        return self.version
