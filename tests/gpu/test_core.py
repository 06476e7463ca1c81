"""What the GPU tests run, run on the CPU: that it runs at all, and that its bounds hold there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the GPU tests run it on the device", allow_module_level=True)

from tests.gpu.core import check_objective, check_parity, engine_parity
from tests.gpu.saving import check_background_save


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_parity(tmp_path: Path, dtype: str) -> None:
    found = engine_parity(tmp_path / "model", "moe", dtype)
    assert found.device == "cpu"
    check_parity(found, dtype)


@pytest.mark.parametrize("name", ["decoupled", "gspo", "sat"])
def test_objectives(name: str) -> None:
    device = torch.device("cpu")
    check_objective(name, device)
    assert device.type == "cpu"


def test_background_save(tmp_path: Path) -> None:
    assert not any(buffer.is_pinned() for buffer in check_background_save(tmp_path)._copies._held.values())
