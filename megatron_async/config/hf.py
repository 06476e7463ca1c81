"""What a Hugging Face checkpoint directory says about itself, read without loading a weight.

Invariants: only JSON and the headers of files are read; a directory that cannot be used is described with every file
that is missing from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Qwen3-like decoder, dense or mixture of experts."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int
    """Width of the dense MLP."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    moe_layers: int = 0
    """Layers whose MLP is a mixture of experts; the others are dense."""
    tied_embeddings: bool = False
    qk_norm: bool = True
    attention_bias: bool = False
    max_positions: int = 0

    @property
    def is_moe(self) -> bool:
        return self.moe_layers > 0


def _moe_layers(raw: dict[str, Any], layers: int, experts: int) -> int:
    """Layers with experts: every `decoder_sparse_step`-th, less those listed in `mlp_only_layers`."""
    if not experts:
        return 0
    step = raw.get("decoder_sparse_step", 1) or 1
    dense = set(raw.get("mlp_only_layers") or [])
    return sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def shape_from_config(raw: dict[str, Any]) -> ModelShape:
    """The shape described by a `config.json`; raises KeyError naming a size that is missing."""
    layers, heads = int(raw["num_hidden_layers"]), int(raw["num_attention_heads"])
    experts = int(raw.get("num_experts") or raw.get("num_local_experts") or 0)
    return ModelShape(
        model_type=str(raw.get("model_type", "")),
        hidden=int(raw["hidden_size"]),
        layers=layers,
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        vocabulary=int(raw["vocab_size"]),
        intermediate=int(raw.get("intermediate_size") or 0),
        experts=experts,
        experts_per_token=int(raw.get("num_experts_per_tok") or 0),
        expert_intermediate=int(raw.get("moe_intermediate_size") or 0),
        moe_layers=_moe_layers(raw, layers, experts),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=str(raw.get("model_type", "")).startswith("qwen3"),
        attention_bias=bool(raw.get("attention_bias", False)),
        max_positions=int(raw.get("max_position_embeddings") or 0),
    )


def read_shape(directory: str | Path) -> ModelShape | None:
    """The shape of a checkpoint, or None where its config.json is missing or is not that of such a decoder."""
    file = Path(directory) / "config.json"
    if not file.is_file():
        return None
    try:
        return shape_from_config(json.loads(file.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, KeyError, TypeError):
        return None


def _weight_problems(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        outside = [shard for shard in shards if Path(shard).name != shard or shard == ".."]
        if outside:
            return [f"{index} names {outside[0]!r}, which is no file of that directory"]
        return [
            f"{directory / shard} is missing, but its index names it"
            for shard in shards
            if not (directory / shard).is_file()
        ]
    if not any(directory.glob("*.safetensors")):
        return [f"{directory} has no *.safetensors file with the weights"]
    return []


def _tokenizer_problems(directory: Path) -> list[str]:
    if not (directory / "tokenizer.json").is_file() and not (directory / "tokenizer.model").is_file():
        return [f"{directory / 'tokenizer.json'} is missing"]
    template = ""
    settings = directory / "tokenizer_config.json"
    if settings.is_file():
        # A checkpoint may name several templates; any that knows tools will do.
        template = json.dumps(json.loads(settings.read_text(encoding="utf-8")).get("chat_template") or "")
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        template += jinja.read_text(encoding="utf-8")
    if not template.strip('"'):
        return [
            f"the tokenizer in {directory} has no chat template; add chat_template.jinja with a branch for tools"
        ]
    if "tools" not in template:
        return [
            f"the chat template of {directory} never mentions `tools`, so the agent would not see what it can call; "
            "use the template of an instruct model with tools (ChatML with a tools branch)"
        ]
    return []


def checkpoint_problems(directory: str | Path) -> list[str]:
    """Everything that keeps a directory from being used as a checkpoint; empty when nothing does."""
    path = Path(directory)
    if not path.is_dir():
        return [f"{path}: no such directory; give the directory of a Hugging Face checkpoint"]
    problems = []
    if not (path / "config.json").is_file():
        problems.append(f"{path / 'config.json'} is missing")
    elif read_shape(path) is None:
        problems.append(
            f"{path / 'config.json'} does not describe a decoder (num_hidden_layers, hidden_size, … missing)"
        )
    return problems + _weight_problems(path) + _tokenizer_problems(path)
