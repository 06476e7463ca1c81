"""What a user gets wrong: one clear message that names the fix, exit code 2, and no process left."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.test_main_job import processes_of, write_config
from tools.benchmark_rows import ROOT


def launch(config: Path, *arguments: str) -> str:
    """stderr of a launch that must fail with exit code 2 and leave nothing running."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_async", "launch", "--config", str(config), *arguments],
        capture_output=True, text=True, cwd=ROOT, timeout=300, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.split("log ends")[0].split("End of")[0]
    assert processes_of(config.parent) == []
    return done.stderr


def test_missing_checkpoint(tmp_path: Path) -> None:
    message = launch(write_config(tmp_path, tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in message
    assert "Hugging Face checkpoint" in message


def test_missing_checkpoint_file(checkpoint: Path, tmp_path: Path) -> None:
    """The weights are gone, the configuration is there."""
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    message = launch(write_config(tmp_path, broken))
    assert "safetensors" in message
    assert str(broken) in message


def test_misspelt_key(checkpoint: Path, tmp_path: Path) -> None:
    message = launch(write_config(tmp_path, checkpoint), "--set", "optimizer.learning_rat=1e-4")
    assert "optimizer.learning_rat: unknown key" in message
    message = launch(write_config(tmp_path, checkpoint), "--set", "batch.group=4")
    assert "did you mean" in message
    assert "batch.groups" in message


def test_port_in_use(checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = launch(write_config(tmp_path, checkpoint), "--set", f"engines.base_port={port}")
    assert str(port) in message
    assert "in use" in message or "listen" in message


def test_too_few_ranks_for_the_layout(checkpoint: Path, tmp_path: Path) -> None:
    message = launch(write_config(tmp_path, checkpoint), "--set", "layout.tensor_model_parallel_size=4")
    assert "world_size" in message
    assert "4" in message


def test_batch_not_divisible(checkpoint: Path, tmp_path: Path) -> None:
    message = launch(write_config(tmp_path, checkpoint), "--set", "batch.group_size=3")
    assert "groups 3 * group_size 3 = 9" in message
    assert "2 data-parallel ranks (remainder 1)" in message
    assert "set batch.groups to 4" in message


def test_server_that_dies_while_starting(checkpoint: Path, tmp_path: Path) -> None:
    message = launch(write_config(tmp_path, checkpoint), "--set", "engines.extra_args=[--no-such-option]")
    assert "no-such-option" in message, "the tail of the server's log is in the message"
    assert "while starting" in message


@pytest.mark.parametrize("damage", ["no template", "no tools"])
def test_tokenizer_without_the_tool_template(checkpoint: Path, tmp_path: Path, damage: str) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    template = broken / "chat_template.jinja"
    if damage == "no template":
        template.unlink()
        settings = json.loads((broken / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (broken / "tokenizer_config.json").write_text(json.dumps(settings))
    else:
        template.write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    message = launch(write_config(tmp_path, broken))
    assert "template" in message
    assert "tools" in message
