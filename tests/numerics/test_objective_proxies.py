"""Proposition 1 of arXiv 2605.12070: masks and clips of the interpolated anchors equal windows of the total ratio."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_async.objectives import TokenBatch
from megatron_async.objectives.kernel import Tokens
from megatron_async.objectives.proxies import behaviour_weight, linear_proxy, loglinear_proxy, reparameterise
from tests.numerics.objective_batches import Problem, objective, random_problem, run
from tests.numerics.objective_reference import Settings, Token, aggregate, min_clip_family
from tools.reparameterisation import CHECK_VALUES, table

MASK, CLIP = (0.990, 1.010), (0.997, 1.004)


@pytest.mark.parametrize("kind", ["linear", "loglinear"])
def test_proxy_equals_its_definition(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(500, generator=generator, dtype=torch.float64)
    live = rollout + torch.randn(500, generator=generator, dtype=torch.float64)
    gap = torch.randint(0, 5, (500,), generator=generator)
    alpha = 1.0 / (gap.double() + 1.0)
    if kind == "linear":
        got = linear_proxy(rollout, live, gap)
        expected = torch.log(alpha * rollout.exp() + (1 - alpha) * live.exp())
    else:
        got = loglinear_proxy(rollout, live, gap)
        expected = alpha * rollout + (1 - alpha) * live
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(behaviour_weight(gap, torch.float64), alpha, rtol=0, atol=0)
    torch.testing.assert_close(got[gap == 0], rollout[gap == 0], rtol=0, atol=1e-15)  # α = 1: the proxy is μ


@pytest.mark.parametrize("kind", ["linear", "loglinear"])
@pytest.mark.parametrize("gap", [0, 1, 2, 3, 7])
def test_masks_and_clips_equal_the_reparameterised_windows_token_by_token(kind: str, gap: int) -> None:
    size = 4000
    generator = torch.Generator().manual_seed(gap)
    rollout = -torch.rand(size, generator=generator, dtype=torch.float64)
    total = 0.03 * torch.randn(size, generator=generator, dtype=torch.float64)
    advantages = torch.where(torch.rand(size, generator=generator) > 0.5, 1.0, -1.0).double()
    ids = torch.zeros(size, dtype=torch.int64)
    batch = TokenBatch(rollout, None, advantages, ids == 0, ids, torch.full_like(ids, gap))
    of = objective("decoupled", anchor=kind)
    live = rollout + total
    anchor = (linear_proxy if kind == "linear" else loglinear_proxy)(rollout, live, batch.version_gap)
    terms = of.preset.terms(Tokens(live, anchor, batch), {})
    bounds = reparameterise(kind, gap, MASK, CLIP)
    ratio = total.exp()
    assert terms.clipped is not None and terms.mask is not None
    expected_mask = (ratio >= bounds.mask_low) & (ratio <= bounds.mask_high)
    expected_clip = torch.where(advantages > 0, ratio > bounds.clip_high, ratio < bounds.clip_low)
    assert torch.equal(terms.mask, expected_mask)
    assert torch.equal(terms.clipped, expected_clip)
    assert expected_clip.any() and not expected_clip.all()
    assert gap == 0 or (expected_mask.any() and not expected_mask.all())


@pytest.mark.parametrize("kind", ["linear", "loglinear"])
def test_decoupled_with_an_interpolated_anchor_against_the_reference(kind: str) -> None:
    """The proxy is detached and moves with π_θ: r_d r_s = r, and the gradient is that of the min-clip on r_s."""
    problem = random_problem(1, discrepancy=0.01, staleness=0.006)
    output, gradient = run(objective("decoupled", anchor=kind), problem)
    live = problem.logprobs.clone().requires_grad_()
    sequences: dict[int, list[Token]] = {}
    for t in torch.nonzero(problem.action).squeeze(-1).tolist():
        rollout, current = problem.batch.rollout_logprobs[t].item(), problem.logprobs[t].item()
        alpha = 1 / (int(problem.batch.version_gap[t]) + 1)
        mixed = math.log(alpha * math.exp(rollout) + (1 - alpha) * math.exp(current))
        anchor = mixed if kind == "linear" else alpha * rollout + (1 - alpha) * current
        token = Token(live[t], rollout, anchor, problem.batch.advantages[t].item(), 0, 0.0, 0.0)
        sequences.setdefault(int(problem.batch.sequence_ids[t]), []).append(token)
    settings = Settings(mask=MASK, eps=(0.003, 0.004), weight="discrepancy")
    expected = aggregate(min_clip_family(list(sequences.values()), settings), "token_mean")
    (expected_gradient,) = torch.autograd.grad(expected, live)
    torch.testing.assert_close(output.loss, expected.detach(), rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("gap", [1, 2, 3])
def test_published_check_values(gap: int) -> None:
    bounds = reparameterise("linear", gap, MASK, CLIP)
    got = (bounds.mask_low, bounds.mask_high, bounds.clip_low, bounds.clip_high)
    assert got == pytest.approx(CHECK_VALUES[gap], abs=6e-5)  # four published decimals
    log_linear = reparameterise("loglinear", gap, MASK, CLIP)
    assert (
        log_linear.mask_low,
        log_linear.mask_high,
        log_linear.clip_low,
        log_linear.clip_high,
    ) == pytest.approx(
        got,
        abs=1.1e-4,  # "within 1e-4", rounded
    )


def test_the_tool_finds_the_closed_form_by_scanning_the_kernel() -> None:
    rows = table()
    assert {(row.kind, row.gap) for row in rows} == {
        (k, n) for k in ("linear", "loglinear") for n in (1, 2, 3)
    }
    assert max(row.difference for row in rows) < 1e-9  # bisection on the kernel's own mask and clip


def test_an_interpolated_anchor_ignores_what_the_caller_scored() -> None:
    problem = random_problem(1)
    with_scores, _ = run(objective("decoupled", anchor="linear"), problem)
    other = Problem(problem.logprobs, problem.batch)
    without, _ = run(objective("decoupled", anchor="linear"), other)
    torch.testing.assert_close(with_scores.loss, without.loss, rtol=0, atol=0)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'linear' or 'loglinear'"):
        reparameterise("cubic", 1, MASK, CLIP)
