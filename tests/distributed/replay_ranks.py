"""Runs on every rank: recorded routing replayed under one layout after another, compared with transformers.

usage: replay_ranks.py DIRECTORY LAYOUT…   with LAYOUT like moe:tp2:ep2, or recompute+moe:pp2
DIRECTORY is what tests.replay_reference wrote; rank 0 leaves findings.json there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_async.config.schema import LayoutConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy
from tests.distributed.engine_ranks import parse_layout, per_expert, whole_gradients, worst_relative
from tests.engine_batches import weighted_loss
from tests.replay_batches import recorded_sequences


def inspect(directory: Path, layout: LayoutConfig, *, recompute: bool) -> dict[str, Any]:
    trainer = TrainerConfig(
        use_distributed_optimizer=False, micro_batch_tokens=48, routing_replay="rollout", recompute=recompute
    )
    model = ModelConfig(path=str(directory / "model"), dtype="float32")
    policy = Policy.build(model, layout, trainer, OptimizerConfig(lr=0.0, clip_grad=0.0))
    sequences = recorded_sequences()
    assert policy.routing is not None
    scored, entropies = policy.logprobs(sequences, entropy=True)
    scoring = policy.routing.take_metrics()
    result = policy.train_step(sequences, weighted_loss(sum(map(len, sequences))))
    training = policy.routing.take_metrics()
    native = policy.logprobs([type(s)(s.token_ids, s.temperature) for s in sequences])
    gradients = whole_gradients(policy)
    if dist.get_rank() != 0:
        return {}
    reference = per_expert(load_file(directory / "reference.safetensors"))
    expected = {name[5:]: value for name, value in reference.items() if name.startswith("grad.")}
    own = np.stack([np.concatenate(scored), np.concatenate(entropies)])
    worst, where = worst_relative(gradients, expected)
    routers = {name: value for name, value in gradients.items() if name.endswith("mlp.gate.weight")}
    return {
        "token_error": float(np.abs(own - reference["tokens"].numpy()).max()),
        "train_token_error": float(np.abs(np.concatenate(result.values[0]) - own[0]).max()),
        "loss_error": abs(result.loss - reference["loss"].item()),
        "gradient_error": worst,
        "gradient_tensor": where,
        "router_gradients": {name: float(value.abs().max()) for name, value in routers.items()},
        "router_error": worst_relative(routers, expected)[0],
        "native_differs": float(np.abs(np.concatenate(native) - own[0]).max()),
        "scoring": scoring,
        "training": training,
    }


def inspect_own(directory: Path, layout: LayoutConfig, *, recompute: bool) -> dict[str, Any]:
    """R2: the policy's own routing at the start, replayed in two updates that move the routers."""
    trainer = TrainerConfig(micro_batch_tokens=48, routing_replay="trainer", recompute=recompute)
    model = ModelConfig(path=str(directory / "model"), dtype="float32")
    policy = Policy.build(model, layout, trainer, OptimizerConfig(lr=3e-2))
    sequences = recorded_sequences()
    assert policy.routing is not None
    scored = policy.logprobs(sequences)  # an engine's records are not replayed
    own = policy.with_own_routing(sequences)
    before = policy.routing.take_metrics()
    loss_fn = weighted_loss(sum(map(len, sequences)))
    first = policy.train_step(own, loss_fn)
    at_start = policy.routing.take_metrics()
    policy.train_step(own, loss_fn)
    records = np.concatenate([np.sort(s.routed_experts, -1) for s in own if s.routed_experts is not None])
    expected = load_file(directory / "reference.safetensors")["native"].numpy()
    return {
        "own_differs": int((records != expected).sum()) if records.shape == expected.shape else -1,
        "own_dtype": str(records.dtype),
        "own_first_error": float(np.abs(np.concatenate(first.logprobs) - np.concatenate(scored)).max()),
        "own_before": before,
        "own_at_start": at_start,
        "own_moved": policy.routing.take_metrics(),
    }


def main() -> None:
    directory, findings = Path(sys.argv[1]), {}
    for text in sys.argv[2:]:
        recompute = text.startswith("recompute+")
        _, layout = parse_layout(text.removeprefix("recompute+"), int(os.environ.get("WORLD_SIZE", "1")))
        findings[text] = inspect(directory, layout, recompute=recompute)
        findings[text] |= inspect_own(directory, layout, recompute=recompute)
    if dist.get_rank() == 0:
        (directory / f"findings{dist.get_world_size()}.json").write_text(json.dumps(findings, indent=1))
    platform.shutdown()


if __name__ == "__main__":
    main()
