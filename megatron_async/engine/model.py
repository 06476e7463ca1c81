"""Hugging Face configuration → Megatron's own GPTModel, for this rank's pipeline stages.

Invariants:
- The model is Megatron's: only the layer specification differs (Transformer Engine where installed, otherwise
  Megatron's local modules with our core attention and norm).
- A model dimension that the layout cannot cut is refused with the arithmetic.
- The loss is never divided by Megatron (``calculate_per_token_loss``): see ``engine/token_model.py``.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_async.config.schema import LayoutConfig, ModelConfig, TrainerConfig
from megatron_async.engine import options, platform
from megatron_async.engine.attention import PackedAttention, SequenceParallelRMSNorm
from megatron_async.engine.hf_config import HFConfig
from megatron_async.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_FULL_RECOMPUTATION = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


class LayoutError(UserError):
    """The layout cannot cut this model evenly."""


def check_model_fits(hf: HFConfig, layout: LayoutConfig) -> None:
    """Refuse a layout that does not divide the model's dimensions.

    Raises:
        LayoutError: naming the dimension, the size and the setting.
    """
    tp, ep = layout.tensor_model_parallel_size, layout.expert_model_parallel_size
    stages = layout.pipeline_model_parallel_size * (layout.virtual_pipeline_model_parallel_size or 1)
    etp = layout.expert_tensor_parallel_size
    dense_ffn = 0 if all(hf.moe_layers) else hf.intermediate_size
    rules = [
        ("vocab_size", hf.vocab_size, "tensor_model_parallel_size", tp),
        ("num_attention_heads", hf.num_attention_heads, "tensor_model_parallel_size", tp),
        ("num_key_value_heads", hf.num_key_value_heads, "tensor_model_parallel_size", tp),
        ("intermediate_size", dense_ffn, "tensor_model_parallel_size", tp),
        ("moe_intermediate_size", hf.moe_intermediate_size, "expert_tensor_parallel_size", etp),
        ("num_experts", hf.num_experts, "expert_model_parallel_size", ep),
        ("num_hidden_layers", hf.num_layers, "pipeline x virtual_pipeline_model_parallel_size", stages),
    ]
    for dimension, value, setting, size in rules:
        if value % size:
            raise LayoutError(
                f"the model's {dimension}={value} is not a multiple of layout.{setting}={size} "
                f"({value} mod {size} = {value % size}); choose a divisor of {value}"
            )
    if not hf.is_moe and (ep > 1 or etp > 1):
        raise LayoutError(
            f"layout.expert_model_parallel_size={ep} and expert_tensor_parallel_size={etp} need a mixture of experts, "
            f"but the checkpoint is dense ({hf.model_type}); set both to 1"
        )
    if hf.is_moe and tp > 1 and not platform.sequence_parallel(layout):
        raise LayoutError(
            "training a mixture of experts with tensor parallel needs layout.sequence_parallel=true"
        )


def transformer_config(
    hf: HFConfig, model: ModelConfig, layout: LayoutConfig, trainer: TrainerConfig
) -> TransformerConfig:
    """Megatron's configuration for this architecture, precision and layout.

    Raises:
        LayoutError: the layout does not divide the model.
        OptionError: `trainer.megatron.transformer` asks for what cannot be.
    """
    check_model_fits(hf, layout)
    dtype = DTYPES[model.dtype]
    own: dict[str, Any] = {
        "num_layers": hf.num_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": hf.head_dim,
        "ffn_hidden_size": hf.intermediate_size,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "perform_initialization": False,
        "calculate_per_token_loss": True,
        # Micro-batches differ in length, so the pipeline's peers exchange shapes.
        "variable_seq_lengths": layout.pipeline_model_parallel_size > 1,
        # The other dispatcher refuses micro-batches of different length, even for a dense model.
        "moe_token_dispatcher_type": "alltoall",
        **_parallel_options(layout),
        **_moe_options(hf),
        **(_FULL_RECOMPUTATION if trainer.recompute else {}),
        **platform.model_options(hf.is_moe),
    }
    config: TransformerConfig = options.build("transformer", own, trainer.megatron.transformer)
    return config


def _parallel_options(layout: LayoutConfig) -> dict[str, Any]:
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    return {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_model_parallel_size,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
        "sequence_parallel": platform.sequence_parallel(layout),
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "batch_p2p_sync": False,
    }


def _moe_options(hf: HFConfig) -> dict[str, Any]:
    if not hf.is_moe:
        return {}
    return {
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_layer_freq": [int(moe) for moe in hf.moe_layers],
        # Softmax over the chosen logits equals softmax over all, then renormalised top-k.
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def layer_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Layer specification of one pipeline chunk of this rank."""
    if platform.setup().transformer_engine:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = SequenceParallelRMSNorm
        layer.submodules.pre_mlp_layernorm = SequenceParallelRMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = SequenceParallelRMSNorm
        attention.k_layernorm = SequenceParallelRMSNorm
        attention.core_attention = PackedAttention
    block.layer_norm = SequenceParallelRMSNorm
    return block


def build_chunks(
    hf: HFConfig, config: TransformerConfig, *, tied: bool | None = None, device: torch.device | None = None
) -> list[GPTModel]:
    """This rank's model: one GPTModel, or one per virtual pipeline stage. Weights are uninitialised: load them.

    Args:
        tied: whether embedding and output layer share their weights; None: as the checkpoint says.
        device: where the parameters are made; None: where the platform has them. "meta" takes no memory.
    """
    stages: list[int | None] = list(range(config.virtual_pipeline_model_parallel_size or 0)) or [None]
    shared = hf.tie_word_embeddings if tied is None else tied
    if device is None:
        return [_build_chunk(hf, config, stage, shared).to(platform.setup().device) for stage in stages]
    with device:
        return [_build_chunk(hf, config, stage, shared).to(device) for stage in stages]


def _build_chunk(hf: HFConfig, config: TransformerConfig, vp_stage: int | None, tied: bool) -> GPTModel:
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, vp_stage),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        rotary_base=hf.rope_theta,
        vp_stage=vp_stage,
    )
