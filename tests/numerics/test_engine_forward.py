"""Log-probs and entropy from sharded logits against a float64 softmax: values, gradients, precision, memory cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_async.config.schema import LayoutConfig
from megatron_async.engine import platform
from megatron_async.engine.forward import vocab_parallel_logprobs

VOCAB, TOKENS = 50, 37


@pytest.fixture(scope="module")
def group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    platform.init_distributed(LayoutConfig(), seed=0)
    return parallel_state.get_tensor_model_parallel_group()


def make_inputs(dtype: torch.dtype, scale: float = 4.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(TOKENS, VOCAB, generator=generator)).to(dtype)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    inverse_temperature = 0.5 + torch.rand(TOKENS, generator=generator)
    return logits, targets, inverse_temperature


def float64_reference(
    logits: torch.Tensor, targets: torch.Tensor, inverse_temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(leaf, log-probs, entropies) in float64 from the same (already rounded) logits."""
    leaf = logits.double().requires_grad_()
    log_p = (leaf * inverse_temperature.double()[:, None]).log_softmax(-1)
    return leaf, log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


# Trap: Megatron's own cross entropy overwrites fp32 logits in place, before an entropy could be taken.
@pytest.mark.parametrize("chunk", [1, 8, 1000])
@pytest.mark.parametrize(
    ("dtype", "gradient_tolerance"),
    # bf16 gradients are rounded once, to 8 bits of mantissa; in fp32, differences of numbers of size 10 are rounded.
    [(torch.float32, 5e-6), (torch.bfloat16, 4e-3)],
)
def test_values_and_gradients_equal_float64(
    group: dist.ProcessGroup, dtype: torch.dtype, gradient_tolerance: float, chunk: int
) -> None:
    logits, targets, inverse_temperature = make_inputs(dtype)
    before = logits.clone()
    logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, inverse_temperature, group, chunk=chunk)
    leaf, reference_logprobs, reference_entropy = float64_reference(before, targets, inverse_temperature)
    weights = torch.linspace(-1, 1, TOKENS)
    ((logprobs * weights).sum() + (entropy * weights.flip(0)).sum()).backward()
    ((reference_logprobs * weights).sum() + (reference_entropy * weights.flip(0)).sum()).backward()
    # fp32 sums over 50 terms of size up to about 20: 1e-5 absolute covers their rounding.
    torch.testing.assert_close(logprobs.double(), reference_logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), reference_entropy, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        logits.grad.double(), leaf.grad, rtol=gradient_tolerance, atol=gradient_tolerance
    )
    assert torch.equal(logits.detach(), before), "the logits were overwritten"


def test_entropy_can_be_left_out(group: dist.ProcessGroup) -> None:
    logits, targets, inverse_temperature = make_inputs(torch.float32)
    logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, inverse_temperature, group, entropy=False)
    logprobs.sum().backward()
    leaf, reference, _ = float64_reference(logits.detach(), targets, inverse_temperature)
    reference.sum().backward()
    assert not entropy.any()
    torch.testing.assert_close(logprobs.double(), reference, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits.grad.double(), leaf.grad, rtol=1e-6, atol=1e-6)


def test_consuming_the_logits_gives_the_same_gradient(group: dist.ProcessGroup) -> None:
    gradients = []
    for consume in (False, True):
        leaf, targets, inverse_temperature = make_inputs(torch.float32)
        leaf.requires_grad_()
        values = vocab_parallel_logprobs(
            leaf * 1.0, targets, inverse_temperature, group, chunk=8, consume=consume
        )
        (values[0] * values[1]).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_may_use_only_one_of_the_two(group: dist.ProcessGroup, which: int) -> None:
    logits, targets, inverse_temperature = make_inputs(torch.float32)
    logits.requires_grad_()
    vocab_parallel_logprobs(logits, targets, inverse_temperature, group)[which].sum().backward()
    leaf, *references = float64_reference(logits.detach(), targets, inverse_temperature)
    references[which].sum().backward()
    # An entropy's gradient is p (log p + H): a difference of fp32 numbers of size 10.
    torch.testing.assert_close(logits.grad.double(), leaf.grad, rtol=1e-6, atol=5e-6)


def test_huge_logits_stay_finite(group: dist.ProcessGroup) -> None:
    logits, targets, inverse_temperature = make_inputs(torch.float32, scale=1e4)
    logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, inverse_temperature, group)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropy).all()
    assert torch.isfinite(logits.grad).all()


def test_gradient_passes_gradcheck_by_finite_differences(group: dist.ProcessGroup) -> None:
    logits, targets, inverse_temperature = make_inputs(torch.float32, scale=1.0)
    logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, inverse_temperature, group)
    (logprobs.sum() + 2 * entropy.sum()).backward()
    direction = torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(5))
    slope = (logits.grad * direction).sum().double()

    def value(step: float) -> torch.Tensor:
        moved = logits.detach().double() + step * direction.double()
        _, reference, entropies = float64_reference(moved, targets, inverse_temperature)
        return reference.sum() + 2 * entropies.sum()

    numeric = (value(1e-5) - value(-1e-5)) / 2e-5
    # Central differences in float64 are good to about 1e-8 here; the fp32 slope rounds at 1e-6 relative.
    torch.testing.assert_close(slope, numeric.detach(), rtol=1e-5, atol=1e-4)
