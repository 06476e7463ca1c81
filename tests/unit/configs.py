"""Checkpoints and configurations for tests of the configuration and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

MOE_SHAPE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
TEMPLATE = "{% for tool in tools %}{{ tool }}{% endfor %}{% for message in messages %}{{ message.content }}{% endfor %}"


def make_checkpoint(directory: Path, shape: dict[str, Any] | None = None, template: str = TEMPLATE) -> Path:
    """A directory with everything a checkpoint has to the eye of the configuration: headers, no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape or MOE_SHAPE))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text(template)
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def write_config(directory: Path, **sections: Any) -> Path:
    """A YAML file over a fresh checkpoint; keyword arguments replace or add sections."""
    data: dict[str, Any] = {
        "name": "test",
        "run_dir": str(directory / "runs"),
        "model": {"path": str(make_checkpoint(directory / "model"))},
        "rollout": {"max_staleness": 1, "max_tokens": 2048},
    }
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump({**data, **sections}))
    return file
