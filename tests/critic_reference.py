"""A tiny critic as transformers' token classifier with one label, and what transformers computes on it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3ForTokenClassification, Qwen3MoeForTokenClassification

from tests.engine_batches import make_sequences
from tests.engine_reference import make_model


def make_critic(kind: str) -> torch.nn.Module:
    """The body of `make_model` with a value head that bites."""
    body = make_model(kind)
    cls = {"dense": Qwen3ForTokenClassification, "moe": Qwen3MoeForTokenClassification}[kind]
    body.config.num_labels = 1
    critic = cls(body.config)
    critic.model.load_state_dict(body.model.state_dict())
    torch.manual_seed(11)
    torch.nn.init.normal_(critic.score.weight, 0.0, 0.2)
    torch.nn.init.constant_(critic.score.bias, 0.3)
    return critic.eval()


def write_reference(directory: Path, kind: str) -> None:
    """Save the language model (`model/`), the critic (`critic/`) and transformers' results (`reference.safetensors`).

    Results: V before each token (`before`, 0 at position 0) and after each sequence (`after`), the loss of
    tests.critic_batches.squared_error, and its gradients `grad.*`.
    """
    make_model(kind).save_pretrained(directory / "model")
    critic = make_critic(kind)
    critic.save_pretrained(directory / "critic")
    sequences = make_sequences()
    before, after, loss = [], [], torch.zeros(())
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids).long()
        values = critic(ids[None]).logits[0, :, 0]
        errors = values[:-1] - torch.from_numpy(sequence.arrays["advantages"])[1:]
        loss = loss + 0.5 * errors.square().sum()
        before.append(torch.cat([torch.zeros(1), values[:-1].detach()]))
        after.append(values[-1].detach())
    loss = loss / sum(len(sequence) for sequence in sequences)
    loss.backward()
    tensors = {"before": torch.cat(before), "after": torch.stack(after), "loss": loss.detach()[None]}
    tensors |= {f"grad.{name}": parameter.grad for name, parameter in critic.named_parameters()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "reference.safetensors"
    )
