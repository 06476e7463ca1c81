"""sglang_bridge: SGLang engines as a policy sampler. Usable alone; knows nothing of a trainer.

- ``EngineServer`` starts, watches and stops a server; ``python -m sglang_bridge.serve`` is the server itself.
- ``EngineClient`` speaks to one engine: token ids in; token ids, log-probs and version spans out.
- ``EnginePool`` spreads requests over several engines.
- ``Publisher`` (imports torch) sends new weights to every engine and proves that they arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_bridge.client import EngineClient
from sglang_bridge.errors import (
    BridgeError,
    EngineError,
    EngineStartError,
    EngineTimeout,
    EngineUnreachable,
    PublishError,
)
from sglang_bridge.pool import EnginePool
from sglang_bridge.protocol import Chunk, Generation, SamplingOptions, Span
from sglang_bridge.server import EngineServer, ServerOptions

if TYPE_CHECKING:
    from sglang_bridge.proof import Canary
    from sglang_bridge.publisher import Publisher, PublishReport

__all__ = [
    "BridgeError", "Canary", "Chunk", "EngineClient", "EngineError", "EnginePool", "EngineServer",
    "EngineStartError", "EngineTimeout", "EngineUnreachable", "Generation", "PublishError", "PublishReport",
    "Publisher", "SamplingOptions", "ServerOptions", "Span",
]


def __getattr__(name: str) -> Any:
    """The publisher's names, on first use: a process that only samples need not import torch."""
    if name == "Canary":
        from sglang_bridge.proof import Canary

        return Canary
    if name in ("Publisher", "PublishReport"):
        from sglang_bridge import publisher

        return getattr(publisher, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
