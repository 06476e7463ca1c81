"""Engine, checkpoints and objectives on one CUDA device. `bash tests/gpu.sh` runs this and the history's tests.

Needs torch, transformers and megatron-core; Transformer Engine and apex are used where they are installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from megatron_async.config.methods import METHODS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install -e .[gpu]"
    ),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_engine_equals_transformers(tmp_path: Path, kind: str, dtype: str) -> None:
    from tests.gpu.core import check_parity, engine_parity

    found = engine_parity(tmp_path / "model", kind, dtype)
    assert found.device == "cuda"
    check_parity(found, dtype)


@pytest.mark.parametrize("name", METHODS)
def test_objectives_equal_the_cpus(name: str) -> None:
    from tests.gpu.core import check_objective

    device = torch.device("cuda")
    check_objective(name, device)
    assert device.type == "cuda"


def test_a_background_save_holds_its_moment(tmp_path: Path) -> None:
    """Copies go to page-locked memory; what training changes right after must not reach the files."""
    from tests.gpu.saving import check_background_save

    writer = check_background_save(tmp_path)
    assert all(buffer.is_pinned() for buffer in writer._copies._held.values())
