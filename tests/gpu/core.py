"""What the GPU tests compare, on any device: engine and transformers on the same one, objectives on it and in float64.

`test_core.py` runs it on the CPU, so that what a GPU will run is known to run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

from megatron_async.config.schema import LayoutConfig, ModelConfig, TrainerConfig
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy
from megatron_async.objectives import TokenBatch
from tests.distributed.engine_ranks import per_expert, train_once, whole_gradients, worst_relative
from tests.engine_batches import OPTIMIZER, make_sequences
from tests.engine_reference import make_model, reference_loss
from tests.numerics.objective_batches import Problem, objective, random_problem, run


@dataclass(frozen=True, slots=True)
class Parity:
    """The engine against transformers on one device.

    tokens: largest difference of log-probs and entropies; mean: their mean difference. mean_theirs: of transformers in
    this precision to transformers in fp32. loss; gradient: largest relative difference of an element, by tensor.
    """

    device: str
    tokens: float
    mean: float
    mean_theirs: float
    loss: float
    gradient: float
    where: str
    exported_differs: list[str]


def engine_parity(folder: Path, kind: str, dtype: str) -> Parity:
    """A tiny model of a kind ("dense", "moe") in a precision ("float32", "bfloat16"), where the platform runs."""
    device = platform.setup().device
    model = make_model(kind).to(torch.float32 if dtype == "float32" else torch.bfloat16)
    model.save_pretrained(folder)
    trainer = TrainerConfig(use_distributed_optimizer=False, micro_batch_tokens=48)
    frozen = replace(OPTIMIZER, clip_grad=0.0, lr=0.0)
    policy = Policy.build(ModelConfig(path=str(folder), dtype=dtype), LayoutConfig(), trainer, frozen)  # type: ignore[arg-type]
    exported = {name: tensor.cpu() for name, tensor in policy.export() if tensor is not None}
    own = np.stack([np.concatenate(kind) for kind in policy.logprobs(make_sequences(), entropy=True)])
    result = train_once(policy)
    gradients = {name: tensor.cpu().float() for name, tensor in whole_gradients(policy).items()}
    platform.shutdown()

    model.to(device)
    loss, tokens = reference_loss(model, make_sequences())
    loss.backward()
    theirs = {name: p.grad.cpu().float() for name, p in model.named_parameters() if p.grad is not None}
    weights = per_expert({name: p.detach().cpu() for name, p in model.named_parameters()})
    exact, error = model.float(), np.abs(own - tokens.cpu().numpy())
    with torch.no_grad():
        _, in_fp32 = reference_loss(exact, make_sequences())
    worst, where = worst_relative(gradients, per_expert(theirs))
    return Parity(
        device=device.type,
        tokens=float(error.max()),
        mean=float(np.abs(own - in_fp32.cpu().numpy()).mean()),
        mean_theirs=float((tokens - in_fp32).abs().mean()),
        loss=abs(result.loss - float(loss)),
        gradient=worst,
        where=where,
        exported_differs=[name for name, tensor in exported.items() if not torch.equal(tensor, weights[name])],
    )


def check_parity(found: Parity, dtype: str) -> None:
    """The bounds of either precision."""
    assert found.exported_differs == []
    if dtype == "float32":
        # Sums in another order on another device's kernels; without TF32.
        assert found.tokens <= 1e-4
        assert found.loss <= 1e-4
        assert found.gradient <= 1e-3, found.where
    else:
        # As near to fp32 as transformers is in this precision; single tokens differ by other experts and rounding.
        assert found.mean <= 1.5 * found.mean_theirs + 2e-3
        assert found.loss <= 0.05


def on(device: torch.device, problem: Problem) -> Problem:
    """The same problem there."""
    values = {field.name: getattr(problem.batch, field.name) for field in fields(TokenBatch)}
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
    return Problem(problem.logprobs.to(device), TokenBatch(**moved))


def check_objective(name: str, device: torch.device) -> None:
    """Loss and gradient in float64 on a device are the CPU's."""
    problem = random_problem(0)
    expected_output, expected = run(objective(name), problem)
    output, gradient = run(objective(name), on(device, problem))
    assert output.loss.device.type == device.type
    # float64 sums of about a hundred terms in another order.
    torch.testing.assert_close(output.loss.cpu(), expected_output.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient.cpu(), expected, rtol=1e-10, atol=1e-12)
