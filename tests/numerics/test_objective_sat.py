"""SAT (arXiv 2607.18722): contracted interval inside PPO's, pessimistic S, two bands of disagreement, global q."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.objectives import Normaliser, TokenBatch
from megatron_async.objectives.batch import Gather
from megatron_async.objectives.kernel import Tokens
from megatron_async.objectives.presets.sat import Sat
from megatron_async.objectives.quantile import inverse_cdf_quantile, truncation_for_second_moment
from tests.numerics.objective_batches import Problem, metrics_of, objective, random_problem, run, select
from tests.numerics.objective_reference import psi, quantile, second_moment_truncation

EPS = 0.2


def alone(values: torch.Tensor) -> torch.Tensor:
    return values


def tokens_of(problem: Problem) -> Tokens:
    return Tokens(problem.logprobs, problem.batch.rollout_logprobs, problem.batch)


def token_terms(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """(d = log r, Â, S_SAT, its slope) on the action tokens, and q."""
    preset = objective("sat").preset
    assert isinstance(preset, Sat)
    tokens = tokens_of(problem)
    statistic = preset.statistic(tokens, alone)
    terms = preset.terms(tokens, statistic)
    on = problem.action
    return (
        tokens.log_total[on],
        problem.batch.advantages[on],
        terms.value[on],
        terms.slope[on],
        float(statistic["q"]),
    )


@settings(max_examples=40)
@given(values=st.lists(st.floats(0, 10), min_size=1, max_size=60), level=st.floats(0.01, 1.0))
def test_quantile_is_the_smallest_value_with_enough_mass(values: list[float], level: float) -> None:
    got = inverse_cdf_quantile(torch.tensor(values, dtype=torch.float64), level).item()
    share = sum(v <= got for v in values) / len(values)
    below = sum(v < got for v in values) / len(values)
    assert got in values
    assert share >= level - 1e-9 and below < level + 1e-9


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 6)), min_size=1, max_size=20),
    level=st.floats(0.05, 1.0),
)
def test_weighted_quantile_equals_repeating_the_values(rows: list[tuple[float, int]], level: float) -> None:
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    weights = torch.tensor([weight for _, weight in rows], dtype=torch.float64)
    repeated = torch.repeat_interleave(values, weights.long())
    assert inverse_cdf_quantile(values, level, weights) == inverse_cdf_quantile(repeated, level)


def test_quantile_of_nothing_is_zero_and_gates_nothing() -> None:
    assert inverse_cdf_quantile(torch.zeros(0), 0.9).item() == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_contracted_interval_pessimism_and_the_two_disagreement_bands(seed: int) -> None:
    problem = random_problem(seed, discrepancy=0.07, staleness=0.03, lengths=(300, 500))
    d, advantage, value, slope, q = token_terms(problem)
    ratio = d.exp()
    gated = d.abs() > q
    plus = torch.where(gated & (d > 0), 1 / (1 + (d / q) ** 2), 1.0)
    minus = torch.where(gated & (d < 0), 1 / (1 + (d / q) ** 2), 1.0)
    assert (plus <= 1).all() and (minus <= 1).all()  # [1-ε c₋, 1+ε c₊] inside [1-ε, 1+ε]
    ppo = torch.minimum(ratio * advantage, ratio.clamp(1 - EPS, 1 + EPS) * advantage)
    ppo_slope = torch.where(
        (advantage > 0) & (ratio > 1 + EPS) | (advantage < 0) & (ratio < 1 - EPS), 0.0, ratio * advantage
    )
    assert (value <= ppo + 1e-15).all()
    upper = (advantage > 0) & (ratio > 1 + EPS * plus) & (ratio < 1 + EPS)
    lower = (advantage < 0) & (ratio > 1 - EPS) & (ratio < 1 - EPS * minus)
    differs = (slope - ppo_slope).abs() > 1e-12
    assert torch.equal(differs, upper | lower)
    assert upper.any() and lower.any()
    assert gated.double().mean() <= 0.10 + 1e-12
    assert torch.minimum(plus, minus)[gated].max() < 0.5


def test_the_end_that_contracts_is_on_the_side_of_d_not_of_the_advantage() -> None:
    """d > 0 with Â < 0: PPO's lower end is untouched and the upper one never acts, so S equals PPO's."""
    problem = random_problem(0, discrepancy=0.2, staleness=0.0, lengths=(400,), placeholders=False)
    d, advantage, value, _, q = token_terms(problem)
    ratio = d.exp()
    crossed = (d.abs() > q) & (d * advantage < 0)
    ppo = torch.minimum(ratio * advantage, ratio.clamp(1 - EPS, 1 + EPS) * advantage)
    assert crossed.any()
    torch.testing.assert_close(value[crossed], ppo[crossed], rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("q", "published"), [(0.005, 0.0166), (0.01, 0.0258), (0.02, 0.0397), (0.03, 0.0507)]
)
def test_newly_cut_updates_start_at_the_published_distance(q: float, published: float) -> None:
    """d* ≈ (ε q²)^{1/3}: the smallest d at which the kernel cuts, found by scanning d for the given q."""
    approximate = (EPS * q * q) ** (1 / 3)
    d = torch.linspace(q, 4 * approximate, 200_001, dtype=torch.float64)
    ids = torch.zeros(d.numel(), dtype=torch.int64)
    ones = torch.ones_like(d)
    batch = TokenBatch(ones * 0 - 1, None, ones, torch.ones_like(ids, dtype=torch.bool), ids, ids)
    preset = objective("sat").preset
    tokens = Tokens(batch.rollout_logprobs + d, batch.rollout_logprobs, batch)
    clipped = preset.terms(tokens, {"q": torch.tensor(q, dtype=torch.float64)}).clipped
    assert clipped is not None
    first = d[clipped][0].item()
    exact_root = math.exp(first) - 1 - EPS * psi(first, q)
    assert abs(exact_root) < 1e-5  # spacing of the scan
    assert first == pytest.approx(published, abs=6e-5)  # four published decimals
    assert approximate == pytest.approx(published, rel=0.12)  # leading order in d


def gather_of(parts: list[Problem], preset: Sat) -> Gather:
    """What data-parallel ranks contribute, in the order `statistic` gathers: a stand-in for the collective."""
    contributions: list[list[torch.Tensor]] = []
    for part in parts:
        seen: list[torch.Tensor] = []
        preset.statistic(tokens_of(part), lambda values, seen=seen: seen.append(values) or values)  # type: ignore[misc]
        contributions.append(seen)
    calls = iter(range(len(contributions[0])))

    def gather(values: torch.Tensor) -> torch.Tensor:
        call = next(calls)
        return torch.cat([seen[call] for seen in contributions])

    return gather


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_quantile_is_that_of_the_global_batch_over_ranks(level: str) -> None:
    problem = random_problem(3, lengths=(30, 1, 50, 20, 7, 12))
    ids = problem.batch.sequence_ids
    parts = [select(problem, torch.nonzero((ids // 7) % 2 == rank).squeeze(-1)) for rank in (0, 1)]
    preset = objective("sat", options={"level": level}).preset
    assert isinstance(preset, Sat)
    whole = preset.statistic(tokens_of(problem), alone)["q"]
    for part in parts:
        assert torch.equal(preset.statistic(tokens_of(part), gather_of(parts, preset))["q"], whole)
    local = [preset.statistic(tokens_of(part), alone)["q"].item() for part in parts]
    assert any(value != whole.item() for value in local), (
        "the parts' own quantiles must differ for this to test"
    )


def test_token_quantile_against_a_sorted_list() -> None:
    problem = random_problem(9)
    d = (problem.logprobs - problem.batch.rollout_logprobs)[problem.action].abs().tolist()
    assert token_terms(problem)[-1] == pytest.approx(quantile(d, 0.9), rel=1e-15)


def test_sat_gspo_weighs_a_sequence_by_its_length() -> None:
    """Nine short sequences with |d| = .01 and one long with |d| = .05: by length the long one is the 90 % quantile."""
    lengths = torch.tensor([2] * 9 + [40])
    d = torch.repeat_interleave(torch.tensor([0.01] * 9 + [0.05], dtype=torch.float64), lengths)
    ids = torch.repeat_interleave(torch.arange(10), lengths)
    rollout = -torch.ones_like(d)
    batch = TokenBatch(
        rollout, None, torch.ones_like(d), torch.ones_like(ids, dtype=torch.bool), ids, ids * 0
    )
    preset = objective("sat", options={"level": "sequence"}).preset
    q = preset.statistic(Tokens(rollout + d, rollout, batch), alone)["q"].item()
    assert q == pytest.approx(0.05, rel=1e-12)


def test_micro_batch_scope_needs_no_preparation_and_uses_its_own_quantile() -> None:
    problem = random_problem(5, discrepancy=0.1, staleness=0.1)
    own = objective("sat", options={"quantile_scope": "microbatch"})
    assert "batch_statistics" not in own.needs
    output, gradient = run(own, problem)
    whole, whole_gradient = run(objective("sat"), problem)  # one micro-batch: both scopes agree
    torch.testing.assert_close(output.loss, whole.loss, rtol=0, atol=0)
    torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=0)


def test_diagnostics() -> None:
    problem = random_problem(6, discrepancy=0.15, staleness=0.1, lengths=(300, 500))
    of = objective("sat")
    shares = metrics_of(of, run(of, problem)[0])
    d, _, _, _, q = token_terms(problem)
    c = torch.where(d.abs() > q, 1 / (1 + (d / q) ** 2), 1.0)
    assert shares["sat/q"] == pytest.approx(q, rel=1e-12)
    assert shares["sat/gate_rate"] == pytest.approx((d.abs() > q).double().mean().item(), rel=1e-12)
    assert shares["sat/min_c"] == pytest.approx(c.min().item(), rel=0.065)  # a histogram bin
    assert shares["sat/epsilon_high"] == pytest.approx(
        (EPS * torch.where(d > 0, c, 1.0)).mean().item(), rel=1e-12
    )
    assert shares["sat/epsilon_low"] == pytest.approx(
        (EPS * torch.where(d < 0, c, 1.0)).mean().item(), rel=1e-12
    )


def test_nothing_is_gated_when_the_policy_has_not_moved() -> None:
    """q = 0: no division by zero, c = 1 everywhere, S equals PPO's."""
    problem = random_problem(6, discrepancy=0.0, staleness=0.0)
    of = objective("sat")
    output, gradient = run(of, problem)
    ppo, ppo_gradient = run(objective("ppo"), problem)
    assert metrics_of(of, output)["sat/gate_rate"] == 0.0
    torch.testing.assert_close(output.loss, ppo.loss, rtol=0, atol=0)
    torch.testing.assert_close(gradient, ppo_gradient, rtol=0, atol=0)


@settings(max_examples=40)
@given(values=st.lists(st.floats(1e-3, 3), min_size=1, max_size=40), bound=st.floats(1e-4, 0.5))
def test_m2po_truncation_meets_the_bound_exactly(values: list[float], bound: float) -> None:
    tau = truncation_for_second_moment(torch.tensor(values, dtype=torch.float64), bound).item()
    assert tau == pytest.approx(second_moment_truncation(values, bound), rel=1e-9)
    moment = sum(min(value, tau) ** 2 for value in values) / len(values)
    assert moment == pytest.approx(bound, rel=1e-9) if math.isfinite(tau) else moment <= bound * (1 + 1e-12)


def test_m2po_moment_is_that_of_the_global_batch() -> None:
    """Rows of one rank alone would give another τ; `prepare` gathers the harmful tokens of all."""
    problem = random_problem(2, staleness=0.5)
    of = objective("m2po", anchor="start")
    other = torch.tensor([3.0, 2.0], dtype=torch.float64)
    own = of.prepare(problem.batch, problem.logprobs, alone).statistic["tau"]
    both = of.prepare(problem.batch, problem.logprobs, lambda values: torch.cat([values, other])).statistic[
        "tau"
    ]
    assert both < own


def test_normaliser_counts_over_ranks() -> None:
    problem = random_problem(2)
    mine = Normaliser.count(problem.batch)
    both = Normaliser.count(problem.batch, lambda values: torch.cat([values, values]))
    assert (both.tokens, both.sequences) == (2 * mine.tokens, 2 * mine.sequences)
    empty = replace(problem.batch, action_mask=torch.zeros_like(problem.action))
    assert Normaliser.count(empty) == Normaliser(0, 0)
