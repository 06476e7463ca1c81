"""Runs on every rank: one policy per layout, compared on rank 0 with what transformers computed.

usage: engine_ranks.py DIRECTORY LAYOUT…   with LAYOUT like moe:tp2:ep2:pp2:vpp2
DIRECTORY holds, for each kind of model, what tests.engine_reference.write_reference wrote; findings.json goes there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_async.config.schema import LayoutConfig, ModelConfig, TrainerConfig
from megatron_async.engine import platform
from megatron_async.engine.forward import vocab_parallel_logprobs
from megatron_async.engine.hf_export import ExportPlan
from megatron_async.engine.hf_reader import CheckpointReader
from megatron_async.engine.policy import Policy, TrainStepResult
from tests.engine_batches import OPTIMIZER, VOCAB, make_sequences, step_batches, weighted_loss
from tools.benchmark_layouts import FIELDS


def parse_layout(text: str, world_size: int) -> tuple[str, LayoutConfig]:
    """Split "moe:tp2:ep2" into the kind of model and the layout."""
    kind, *parts = text.split(":")
    sizes = {}
    for part in parts:
        match = re.fullmatch(r"([a-z]+)(\d+)", part)
        assert match is not None, part
        sizes[FIELDS[match[1]]] = int(match[2])
    return kind, LayoutConfig(world_size=world_size, **sizes)


def whole_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Whole gradients under Hugging Face names, on rank 0."""
    pieces = policy.pieces(lambda parameter: parameter.main_grad)
    stream = ExportPlan(policy.table, pieces).stream()
    return {name: tensor.clone() for name, tensor in stream if tensor is not None}


def worst_relative(values: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest max|Δ| / max|reference| over the tensors, and the tensor it is in."""
    errors = {
        name: ((value - reference[name]).abs().max() / reference[name].abs().max()).item()
        for name, value in values.items()
    }
    worst = max(errors, key=errors.__getitem__, default="")
    return errors.get(worst, 0.0), worst


def train_once(policy: Policy) -> TrainStepResult:
    sequences = make_sequences()
    return policy.train_step(sequences, weighted_loss(sum(map(len, sequences))))


def inspect_gradients(directory: Path, layout: LayoutConfig) -> dict[str, Any]:
    """Log-probs, loss, element-wise gradients and exported bits of one layout."""
    trainer = TrainerConfig(use_distributed_optimizer=False, micro_batch_tokens=48)
    model = ModelConfig(path=str(directory / "model"), dtype="float32")
    policy = Policy.build(model, layout, trainer, replace(OPTIMIZER, clip_grad=0.0, lr=0.0))
    exported = dict(policy.export())
    logprobs, entropy = policy.logprobs(make_sequences(), entropy=True)
    result = train_once(policy)
    gradients = whole_gradients(policy)
    if dist.get_rank() != 0:
        return {}
    reference = load_file(directory / "reference.safetensors")
    reader = CheckpointReader(directory / "model")
    differing = [
        name
        for name, tensor in exported.items()
        if not torch.equal(tensor, reader.read(name, tuple((0, n) for n in tensor.shape)))
    ]
    own = np.stack([np.concatenate(logprobs), np.concatenate(entropy)])
    worst, name = worst_relative(
        gradients, {key[5:]: value for key, value in per_expert(reference).items() if key.startswith("grad.")}
    )
    return {
        "token_error": float(np.abs(own - reference["tokens"].numpy()).max()),
        "train_logprob_error": float(np.abs(np.concatenate(result.logprobs) - own[0]).max()),
        "loss_error": abs(result.loss - reference["loss"].item()),
        "norm_error": abs(result.grad_norm / reference["norm"].item() - 1.0),
        "tokens_counted": float(result.stats["tokens"]),
        "gradient_error": worst,
        "gradient_tensor": name,
        "gradients_compared": len(gradients),
        "export_differs": differing,
        "exported": len(exported),
    }


def inspect_steps(directory: Path, layout: LayoutConfig) -> dict[str, Any]:
    """Weights after a few steps with the distributed optimiser, clipping and a schedule, against torch's AdamW."""
    trainer = TrainerConfig(use_distributed_optimizer=True, micro_batch_tokens=48)
    model = ModelConfig(path=str(directory / "model"), dtype="float32")
    policy = Policy.build(model, layout, trainer, OPTIMIZER)
    norms = [
        policy.train_step(sequences, weighted_loss(sum(map(len, sequences)))).grad_norm
        for sequences in step_batches()
    ]
    weights = {name: tensor.clone() for name, tensor in policy.export() if tensor is not None}
    if dist.get_rank() != 0:
        return {}
    reference = per_expert(load_file(directory / "reference.safetensors"))
    stepped = {key[8:]: value for key, value in reference.items() if key.startswith("stepped.")}
    expected = torch.tensor(reference["norms"].tolist())
    worst, name = worst_relative(weights, stepped)
    return {
        "step_error": worst,
        "step_tensor": name,
        "step_norm_error": ((torch.tensor(norms) - expected) / expected).abs().max().item(),
    }


def inspect_vocabulary() -> dict[str, float]:
    """Worst error of sharded log-probs, entropies and gradients against a float64 softmax, per precision."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(0)
    whole = 3 * torch.randn(23, VOCAB, generator=generator)
    targets = torch.randint(0, VOCAB, (23,), generator=generator)
    inverse = 0.5 + torch.rand(23, generator=generator)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        leaf = whole.to(dtype).double().requires_grad_()
        log_p = (leaf * inverse.double()[:, None]).log_softmax(-1)
        reference = [log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
        sum(reference).sum().backward()  # type: ignore[union-attr]
        shard = whole.to(dtype).chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
        values = vocab_parallel_logprobs(shard, targets, inverse, group, chunk=10)
        sum(values).sum().backward()  # type: ignore[union-attr]
        gradient = leaf.grad.chunk(group.size(), -1)[group.rank()]
        pairs = [*zip(values, reference, strict=True), (shard.grad, gradient)]
        worst = torch.stack([(own.double() - other).abs().max().detach() for own, other in pairs]).max()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        errors[str(dtype).removeprefix("torch.")] = worst.item()
    return errors


def per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split transformers' fused experts into the published per-expert tensors."""
    result = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            for e, (gate, up) in enumerate(expert.chunk(2) for expert in tensor):
                result[f"{prefix}.experts.{e}.gate_proj.weight"] = gate
                result[f"{prefix}.experts.{e}.up_proj.weight"] = up
        elif last == "down_proj":
            result |= {f"{prefix}.experts.{e}.down_proj.weight": expert for e, expert in enumerate(tensor)}
        else:
            result[name] = tensor
    return result


def main() -> None:
    directory = Path(sys.argv[1])
    findings = {}
    for text in sys.argv[2:]:
        kind, layout = parse_layout(text, int(os.environ["WORLD_SIZE"]))
        found = inspect_gradients(directory / kind, layout) | inspect_steps(directory / kind, layout)
        findings[text] = found | {"vocabulary": inspect_vocabulary()}
    if dist.get_rank() == 0:
        (directory / "findings.json").write_text(json.dumps(findings, indent=1))
    platform.shutdown()


if __name__ == "__main__":
    main()
