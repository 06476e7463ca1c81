"""What all tests share: one thread per process, no network, and reasons for skipping what this machine lacks."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# Before torch or a tokenizer is imported anywhere: pools of threads on few cores slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import settings

# Shared cores make the time of a single example meaningless; a failing example must be the same on every machine.
settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("suite")


def _no_cuda() -> str:
    """Why there is no CUDA device, or "" when there is one."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device on this machine"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests with a reason where there is no GPU; torch is only imported when there are any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    reason = _no_cuda()
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def smallest_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that loads in no time, for tests in which no model speaks. Not to be written to."""
    from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint

    path = tmp_path_factory.mktemp("smallest_checkpoint")
    write_tiny_checkpoint(path, seed=0, shape=TinyShape(hidden=8, layers=1, experts=2, expert_hidden=8))
    return path
