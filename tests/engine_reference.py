"""Tiny Qwen3 checkpoints with weights that bite, and what transformers computes on them: the engine's reference."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_async.engine.sequences import Sequence
from tests.engine_batches import ENTROPY_WEIGHT, LRS, OPTIMIZER, VOCAB, make_sequences, step_batches

if not torch.cuda.is_available():
    # The published torchvision, which transformers imports, does not load beside a CPU torch without these operators.
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", signature)

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 512,
    "attention_bias": False,
}


def make_model(kind: str, seed: int = 7) -> torch.nn.Module:
    """ "dense" (tied embeddings) or "moe" (untied, one dense layer), every weight non-trivial."""
    torch.manual_seed(seed)
    if kind == "dense":
        model: torch.nn.Module = Qwen3ForCausalLM(Qwen3Config(**COMMON, tie_word_embeddings=True))
    else:
        moe = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
        config = Qwen3MoeConfig(
            **COMMON, **moe, mlp_only_layers=[2], decoder_sparse_step=1, tie_word_embeddings=False
        )
        model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        scale = 0.2 if "norm" in name else 0.5 if "mlp.gate.weight" in name else 0.12
        parameter.data.normal_(1.0 if "norm" in name else 0.0, scale)
    return model


def reference_forward(model: torch.nn.Module, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-aligned log-probs and entropies of one sequence, [L] each, by transformers and a full softmax."""
    ids = torch.from_numpy(sequence.token_ids).long().to(next(model.parameters()).device)
    logits = model(ids[None], use_cache=False).logits[0, :-1].float() / sequence.temperature
    log_p = logits.log_softmax(-1)
    chosen = log_p.gather(-1, ids[1:, None])[:, 0]
    zero = torch.zeros(1, device=ids.device)
    return torch.cat([zero, chosen]), torch.cat([zero, -(log_p.exp() * log_p).sum(-1)])


def reference_loss(model: torch.nn.Module, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of tests.engine_batches.weighted_loss, and log-probs and entropies [2, tokens] of the batch."""
    total = sum(len(sequence) for sequence in sequences)
    device = next(model.parameters()).device
    loss, tokens = torch.zeros((), device=device), []
    for sequence in sequences:
        logprobs, entropy = reference_forward(model, sequence)
        weight = torch.from_numpy(sequence.arrays["advantages"]).to(device)
        loss = loss - (weight * logprobs + ENTROPY_WEIGHT * entropy).sum() / total
        tokens.append(torch.stack([logprobs, entropy]).detach())
    return loss, torch.cat(tokens, 1)


def write_reference(directory: Path, kind: str) -> None:
    """Save the checkpoint (`model/`) and transformers' results on it (`reference.safetensors`).

    Results: log-probs and entropies (`tokens`), `loss`, `grad.*`, their `norm`, and with torch's AdamW the weights
    after the steps of step_batches (`stepped.*`) and the gradient norms met (`norms`).
    """
    model = make_model(kind)
    model.save_pretrained(directory / "model")
    loss, tokens = reference_loss(model, make_sequences())
    loss.backward()
    tensors = {"tokens": tokens, "loss": loss.detach()[None]}
    tensors |= {f"grad.{name}": parameter.grad.clone() for name, parameter in model.named_parameters()}
    betas = (OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    tensors |= {"norm": norm[None]}
    adam = torch.optim.AdamW(model.parameters(), betas=betas, eps=OPTIMIZER.adam_eps, weight_decay=0.0)
    norms = []
    for lr, sequences in zip(LRS, step_batches(), strict=True):
        adam.zero_grad()
        reference_loss(model, sequences)[0].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad))
        adam.param_groups[0]["lr"] = lr
        adam.step()
    tensors |= {"norms": torch.stack(norms)}
    tensors |= {f"stepped.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "reference.safetensors"
    )
