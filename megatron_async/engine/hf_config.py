"""The part of a Hugging Face ``config.json`` that decides the architecture, checked and typed.

Invariant: what cannot be built exactly is refused here, with the field that says so; nothing is ignored silently.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async.errors import UserError

SUPPORTED_MODEL_TYPES = ("qwen3", "qwen3_moe")


class UnsupportedModelError(UserError):
    """The checkpoint's configuration asks for something the engine does not build."""


@dataclass(frozen=True, slots=True)
class HFConfig:
    """Architecture of a Qwen3 or Qwen3-MoE checkpoint.

    Attributes:
        moe_layers: one flag per layer, True where the MLP is a mixture of experts (all False for dense).
        norm_topk_prob: the router's top-k probabilities are renormalised to sum to one.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    moe_layers: tuple[bool, ...]
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True

    @property
    def is_moe(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(self.moe_layers)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "HFConfig":
        """Read the configuration of a checkpoint directory.

        Raises:
            UnsupportedModelError: no ``config.json`` there, or an architecture or option that is not built.
        """
        if not (Path(path) / "config.json").is_file():
            raise UnsupportedModelError(
                f"no config.json in {Path(path).absolute()}; model.path must be a Hugging Face checkpoint directory"
            )
        from transformers import AutoConfig

        return cls.from_transformers(AutoConfig.from_pretrained(path, local_files_only=True))

    @classmethod
    def from_transformers(cls, config: Any) -> "HFConfig":
        """Convert a transformers configuration object (its defaults filled in)."""
        _check_supported(config)
        moe = config.model_type == "qwen3_moe"
        return cls(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=float(_rope(config)["rope_theta"]),
            tie_word_embeddings=config.tie_word_embeddings,
            moe_layers=_moe_layers(config) if moe else (False,) * config.num_hidden_layers,
            num_experts=config.num_experts if moe else 0,
            num_experts_per_tok=config.num_experts_per_tok if moe else 0,
            moe_intermediate_size=config.moe_intermediate_size if moe else 0,
            norm_topk_prob=config.norm_topk_prob if moe else True,
        )


def _rope(config: Any) -> dict[str, Any]:
    """RoPE parameters in transformers 5's form (``rope_parameters``) or 4's (``rope_theta``, ``rope_scaling``)."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is not None:
        return dict(parameters)
    return {"rope_theta": config.rope_theta, **(getattr(config, "rope_scaling", None) or {})}


def _moe_layers(config: Any) -> tuple[bool, ...]:
    """Layers that are mixtures of experts, by Qwen3-MoE's rule (``mlp_only_layers``, ``decoder_sparse_step``)."""
    dense = set(config.mlp_only_layers or ())
    step = config.decoder_sparse_step
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(config.num_hidden_layers))


def _check_supported(config: Any) -> None:
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} is not supported; use a checkpoint of {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    refused = {
        "hidden_act": config.hidden_act != "silu",
        "attention_bias": bool(config.attention_bias),
        "use_sliding_window": bool(getattr(config, "use_sliding_window", False)),
        "rope_parameters": _rope(config).get("rope_type", _rope(config).get("type", "default")) != "default",
    }
    for field, bad in refused.items():
        if bad:
            value = _rope(config) if field == "rope_parameters" else getattr(config, field)
            raise UnsupportedModelError(
                f"{config.model_type} checkpoint with {field}={value!r} is not supported: the engine builds SwiGLU "
                f"layers without attention bias, sliding window or scaled RoPE"
            )
