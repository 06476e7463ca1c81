"""Hugging Face → sharded → Hugging Face gives the same bits, dense and MoE, under one layout and another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_async import training_record
from megatron_async.engine.hf_reader import CheckpointReader
from megatron_async.training.checkpointing import read_generation
from tests.distributed.launch import launch
from tests.engine_reference import make_model
from tools import convert_checkpoint

TOOL = Path(convert_checkpoint.__file__)


def check_same_bits(original: Path, converted: Path) -> None:
    reader, weights = CheckpointReader(original), load_file(converted / "model.safetensors")
    assert set(weights) == set(reader.names())
    for name, tensor in weights.items():
        expected = reader.read(name, tuple((0, n) for n in tensor.shape))
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize(
    ("kind", "dtype", "write", "read"),
    [
        ("moe", torch.bfloat16, ["--tensor-model-parallel-size", "2"], ["--expert-model-parallel-size", "2"]),
        pytest.param(
            "dense", torch.float32, ["--pipeline-model-parallel-size", "2"], [], marks=pytest.mark.slow
        ),
    ],
)
def test_round_trip(tmp_path: Path, kind: str, dtype: torch.dtype, write: list[str], read: list[str]) -> None:
    """A tied embedding, which the last pipeline stage holds once more, is one tensor again."""
    original, back = tmp_path / "original", tmp_path / "back"
    sharded = tmp_path / "run" / "checkpoints" / "step_000000"
    sharded.parent.mkdir(parents=True)
    (tmp_path / "run" / training_record.FILE).write_text("what the run was trained on")
    make_model(kind).to(dtype).save_pretrained(original)
    launch(TOOL, 2, "from-hf", str(original), "--out", str(sharded), *write, logs=tmp_path / "logs")
    generation = read_generation(sharded)
    assert generation is not None
    assert generation.optimizer_steps is None
    ranks = 2 if read else 1
    command = ("to-hf", str(sharded), "--out", str(back), "--model", str(original), *read)
    launch(TOOL, ranks, *command, logs=tmp_path / "logs")
    check_same_bits(original, back)
    assert (back / training_record.FILE).read_text() == "what the run was trained on"


def test_what_cannot_be_converted_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert_checkpoint.main(["to-hf", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert convert_checkpoint.main(["from-hf", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "--dtype" in capsys.readouterr().err
