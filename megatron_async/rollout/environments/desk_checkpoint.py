"""Tiny Qwen3 checkpoints in the published Hugging Face layout, with the desk's tokenizer or another small one, to start
a run from.

Invariants
- The files are what a published Qwen3 or Qwen3-MoE checkpoint holds: per-expert tensor names, `num_experts` and
  `rope_theta` in config.json, safetensors, tokenizer and chat template. What loads them loads the real ones.
- The same shape and seed give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerFast

from megatron_async.rollout.environments.desk_tokenizer import VOCABULARY_SIZE, build_tokenizer
from megatron_async.rollout.environments.small_tokenizer import CONTEXT_LENGTH


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of a tiny Qwen3. With `experts` 0 it is dense, and its MLP `expert_hidden` * `experts_per_token` wide.
    `vocabulary` is the tokenizer's: `write_tiny_checkpoint` sets it."""

    hidden: int = 64
    layers: int = 3
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 16
    experts: int = 8
    experts_per_token: int = 2
    expert_hidden: int = 64
    tied_embeddings: bool = False
    vocabulary: int = VOCABULARY_SIZE

    def __post_init__(self) -> None:
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.key_value_heads} key-value heads equally"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embeddings pair its halves")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is not within 1 to experts {self.experts}"
            )

    @property
    def dense_hidden(self) -> int:
        """Width of a dense MLP with as many active parameters as the experts a token visits."""
        return self.expert_hidden * self.experts_per_token


def write_tiny_checkpoint(
    out: Path, seed: int, shape: TinyShape = TinyShape(), tokenizer: PreTrainedTokenizerFast | None = None
) -> int:
    """Write a randomly initialised checkpoint (float32) with tokenizer and chat template; returns its parameter count.

    tokenizer: None for the desk's. Raises FileExistsError when `out` already holds a checkpoint.
    """
    if (out / "config.json").exists():
        raise FileExistsError(f"{out} already holds a checkpoint: choose another directory or remove it")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or build_tokenizer()
    shape = replace(shape, vocabulary=len(tokenizer))
    tokenizer.save_pretrained(str(out))
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    _write_json(out / "config.json", config(shape) | ids)
    _write_json(out / "generation_config.json", ids | {"do_sample": True, "temperature": 1.0})
    tensors = initial_tensors(shape, seed)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    return sum(tensor.size for tensor in tensors.values())


def config(shape: TinyShape) -> dict[str, Any]:
    """config.json in the published form, without token ids."""
    common: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": shape.tied_embeddings,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if not shape.experts:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **common}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **common,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_hidden,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
    }


def initial_tensors(shape: TinyShape, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Randomly initialised float32 tensors by their published names.

    Norm weights are 1. Matrices are normal with variance 1/fan-in, those that write into the residual stream divided by
    the number of writers, so that the stream keeps its scale over depth.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    residual = 1.0 / math.sqrt(2 * shape.layers)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, size in tensor_shapes(shape):
        if len(size) == 1:
            tensors[name] = np.ones(size, np.float32)
            continue
        scale = 1.0 / math.sqrt(size[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= residual
        tensors[name] = generator.standard_normal(size, np.float32) * np.float32(scale)
    return tensors


def tensor_shapes(shape: TinyShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor, in the order of the model."""
    hidden, head = shape.hidden, shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocabulary, hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (shape.heads * head, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (shape.key_value_heads * head, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (shape.key_value_heads * head, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, shape.heads * head)
        yield f"{prefix}.self_attn.q_norm.weight", (head,)
        yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if shape.experts:
            yield f"{prefix}.mlp.gate.weight", (shape.experts, hidden)
            for expert in range(shape.experts):
                yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, shape.expert_hidden)
        else:
            yield from _mlp(f"{prefix}.mlp", hidden, shape.dense_hidden)
    yield "model.norm.weight", (hidden,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (shape.vocabulary, hidden)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
