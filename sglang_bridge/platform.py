"""CUDA or CPU: the one place of the bridge that asks.

Every other module works on either. ``serve`` asks once per engine process, before SGLang is imported;
the publisher asks for the default backend of its process group.
"""

from __future__ import annotations

import functools


@functools.cache
def has_accelerator() -> bool:
    """True when this process can use a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def default_backend() -> str:
    """The collective backend weights travel over: ``nccl`` between GPUs, ``gloo`` otherwise."""
    return "nccl" if has_accelerator() else "gloo"
