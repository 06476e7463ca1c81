"""What transformers computes when its routers are told which experts to choose: the reference of routing replay."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_async.engine.sequences import Sequence
from tests.engine_batches import ENTROPY_WEIGHT
from tests.engine_reference import make_model, reference_forward
from tests.replay_batches import TOPK, recorded_sequences, replayed


def force_routing(model: torch.nn.Module, sequence: Sequence) -> None:
    """Routers choose the sequence's recorded experts, with weights from their own logits; the others choose freely."""
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    record = torch.from_numpy(sequence.routed_experts).long() if replayed(sequence) else None
    for column, gate in enumerate(gates):

        def forward(self: Any, hidden: torch.Tensor, column: int = column) -> tuple[torch.Tensor, ...]:
            logits = torch.nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
            experts = logits.topk(TOPK, -1).indices
            if record is not None:
                experts = torch.cat([record[:, column], experts[len(record) :]])
            scores = torch.softmax(logits, -1, dtype=torch.float).gather(1, experts)
            return logits, scores / scores.sum(-1, keepdim=True), experts

        gate.forward = types.MethodType(forward, gate)


@torch.no_grad()
def native_routing(model: torch.nn.Module, sequence: Sequence) -> torch.Tensor:
    """What the routers choose by themselves for all tokens but the last: int64 [L - 1, MoE layers, top-k], sorted."""
    chosen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda gate, _, out: chosen.append(out[2][:-1])) for gate in gates]
    reference_forward(model, sequence)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values


def write_replay_reference(directory: Path) -> None:
    """The model; its own routing of the recorded sequences; log-probs, loss and gradients of them under theirs."""
    model = make_model("moe")
    model.save_pretrained(directory / "model")
    sequences = recorded_sequences()
    native = torch.cat([native_routing(model, sequence) for sequence in sequences])
    tokens = []
    for sequence in sequences:
        force_routing(model, sequence)
        tokens.append(torch.stack(reference_forward(model, sequence)))
    count = sum(map(len, sequences))
    advantages = torch.cat([torch.from_numpy(s.arrays["advantages"]) for s in sequences])
    logprobs, entropies = torch.cat(tokens, 1)
    loss = -(advantages * logprobs + ENTROPY_WEIGHT * entropies).sum() / count
    loss.backward()
    gradients = {f"grad.{name}": p.grad for name, p in model.named_parameters()}
    save_file(
        {
            "tokens": torch.stack([logprobs, entropies]).detach(),
            "loss": loss.detach(),
            "native": native,
            **gradients,
        },
        directory / "reference.safetensors",
    )
