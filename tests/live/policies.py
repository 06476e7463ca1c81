"""Tiny checkpoints with weights that bite, and what transformers computes on them: the reference of the live tests."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tests.engine_reference  # noqa: F401  (lets transformers load beside the installed torchvision)
from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint


@dataclass
class Policy:
    """A checkpoint directory and its reference model (float32, by transformers)."""

    path: Path

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Hugging Face names and weights."""
        return load_file(self.path / "model.safetensors")

    @cached_property
    def model(self) -> torch.nn.Module:
        """transformers' model, in evaluation mode."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Token-aligned log-probs of ``ids``, from a float64 softmax; ``[0]`` is 0."""
        logits = self.model(torch.tensor([list(ids)])).logits[0, :-1].double() / temperature
        chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        return [0.0, *chosen.tolist()]

    @torch.no_grad()
    def routed_experts(self, ids: Sequence[int], top_k: int) -> Tensor:
        """Experts of each token, sorted by number: [tokens, layers, top-k]."""
        output = self.model(torch.tensor([list(ids)]), output_router_logits=True)
        return torch.stack([layer.topk(top_k).indices.sort(-1).values for layer in output.router_logits], 1)


def make_policy(path: Path, seed: int = 0) -> Policy:
    """A random Qwen3-MoE whose distributions are far from uniform and differ from layer to layer."""
    write_tiny_checkpoint(path, seed, TinyShape())
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(path / "model.safetensors")
    strong = {name: torch.randn(tensor.shape, generator=generator) * (0.1 if tensor.ndim > 1 else 0.2)
              + (0 if tensor.ndim > 1 else 1) for name, tensor in tensors.items()}
    save_file(strong, path / "model.safetensors", metadata={"format": "pt"})
    return Policy(path)


def updated(policy: Policy, path: Path, seed: int) -> Policy:
    """``policy`` after one (random) update, a checkpoint of its own."""
    shutil.copytree(policy.path, path)
    generator = torch.Generator().manual_seed(seed)
    moved = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
             for name, tensor in policy.tensors.items()}
    save_file(moved, path / "model.safetensors", metadata={"format": "pt"})
    return Policy(path)
