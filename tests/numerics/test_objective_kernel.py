"""The kernel's promises: cuts, order, packing and padding change nothing; placeholders never leak."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_async.config.errors import ConfigError
from megatron_async.config.methods import METHODS
from megatron_async.objectives import ContextParallel, EmptyBatch, Normaliser, TokenBatch
from tests.numerics.objective_batches import (
    SEQUENCE_WIDE,
    Problem,
    metrics_of,
    objective,
    prepared,
    random_problem,
    run,
    select,
)

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_sum")
# Sums of about a hundred float64 terms in another order.
SAME = {"rtol": 1e-11, "atol": 1e-14}


def parts_of(problem: Problem, assignment: list[int]) -> list[Tensor]:
    """Token positions of each part, whole sequences dealt to parts by `assignment`."""
    ids = problem.batch.sequence_ids
    owner = torch.tensor([assignment[i % len(assignment)] for i in range(len(ids.unique()))])
    part = owner[torch.unique(ids, return_inverse=True)[1]]
    return [torch.nonzero(part == number).squeeze(-1) for number in part.unique()]


@pytest.mark.parametrize("name", sorted(METHODS))
@settings(max_examples=6)
@given(
    seed=st.integers(0, 10_000),
    assignment=st.lists(st.integers(0, 3), min_size=2, max_size=5),
    aggregation=st.sampled_from(AGGREGATIONS),
    rejected=st.booleans(),
)
def test_any_cut_into_micro_batches_or_ranks_gives_the_same_gradient(
    name: str, seed: int, assignment: list[int], aggregation: str, rejected: bool
) -> None:
    problem = random_problem(seed, lengths=(9, 1, 14, 5, 11))
    of = objective(
        name, aggregation=aggregation, rejected_in_denominator=rejected, mask_low=0.3, mask_high=4.0
    )
    normaliser, state = Normaliser.count(problem.batch), prepared(of, problem)
    whole, gradient = run(of, problem, normaliser, state)
    loss, summed, stats = torch.zeros((), dtype=torch.float64), torch.zeros_like(gradient), 0.0
    for part in parts_of(problem, assignment):
        output, part_gradient = run(of, select(problem, part), normaliser, state)
        loss, stats = loss + output.loss.detach(), stats + output.stats["statistics"]
        summed[part] = part_gradient
    torch.testing.assert_close(loss, whole.loss.detach(), **SAME)
    torch.testing.assert_close(summed, gradient, **SAME)
    torch.testing.assert_close(stats, whole.stats["statistics"], rtol=1e-6, atol=1e-6)  # metrics are float32


@pytest.mark.parametrize("name", sorted(METHODS))
@settings(max_examples=6)
@given(seed=st.integers(0, 10_000), aggregation=st.sampled_from(AGGREGATIONS), shuffle=st.integers(0, 10_000))
def test_order_packing_and_padding_change_nothing(
    name: str, seed: int, aggregation: str, shuffle: int
) -> None:
    problem = random_problem(seed, lengths=(8, 1, 12, 6))
    of = objective(name, aggregation=aggregation)
    whole, gradient = run(of, problem)
    generator = torch.Generator().manual_seed(shuffle)
    order = torch.randperm(problem.logprobs.numel(), generator=generator)
    shuffled, permuted = run(of, select(problem, order))
    torch.testing.assert_close(shuffled.loss, whole.loss, **SAME)
    torch.testing.assert_close(permuted, gradient[order], **SAME)
    compact = torch.nonzero(problem.action).squeeze(-1)
    packed, compact_gradient = run(of, select(problem, compact))
    torch.testing.assert_close(packed.loss, whole.loss, **SAME)
    torch.testing.assert_close(compact_gradient, gradient[compact], **SAME)


class SharedSum:
    """An all-reduce between threads that stand for context-parallel ranks."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.shares: dict[int, Tensor] = {}

    def all_reduce(self, rank: int, values: Tensor) -> Tensor:
        self.shares[rank] = values
        self.barrier.wait()
        total = sum(self.shares.values(), start=torch.zeros_like(values))
        self.barrier.wait()
        return total


@pytest.mark.parametrize(
    ("name", "config"), SEQUENCE_WIDE, ids=lambda value: value if isinstance(value, str) else ""
)
def test_sequences_shared_by_context_parallel_ranks_give_the_same_gradient(
    name: str, config: dict[str, Any]
) -> None:
    """Each rank holds a share of every sequence; one share of the one-token sequence is empty."""
    problem = random_problem(5, lengths=(20, 1, 31, 16), placeholders=False)
    ids = torch.unique(problem.batch.sequence_ids, return_inverse=True)[1]
    problem = Problem(problem.logprobs, replace(problem.batch, sequence_ids=ids))
    of = objective(name, **config)
    assert "whole_sequences" in of.needs
    normaliser, state = Normaliser.count(problem.batch), prepared(of, problem)
    whole, gradient = run(of, problem, normaliser, state)
    shared, at = SharedSum(2), torch.arange(ids.numel())

    def rank(number: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = at[at % 2 == number]
        share = select(problem, rows)
        context = ContextParallel(4, lambda values: shared.all_reduce(number, values))
        batch = replace(share.batch, context=context)
        output, own = run(of, Problem(share.logprobs, batch), normaliser, state)
        return rows, output.loss.detach(), own

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(rank, range(2)))
    summed = torch.zeros_like(gradient)
    for rows, _, own in results:
        summed[rows] = own
    torch.testing.assert_close(results[0][1] + results[1][1], whole.loss.detach(), **SAME)
    torch.testing.assert_close(summed, gradient, **SAME)


def two_sequences(per_token: tuple[float, float], lengths: tuple[int, int]) -> Problem:
    """REINFORCE tokens whose losses are given: log π = -1, Â = the loss."""
    advantages = torch.tensor([per_token[0]] * lengths[0] + [per_token[1]] * lengths[1], dtype=torch.float64)
    ids = torch.tensor([0] * lengths[0] + [1] * lengths[1])
    logprobs = torch.full((sum(lengths),), -1.0, dtype=torch.float64)
    batch = TokenBatch(
        logprobs, logprobs, advantages, torch.ones_like(ids, dtype=torch.bool), ids, torch.zeros_like(ids)
    )
    return Problem(logprobs, batch)


@pytest.mark.parametrize("split", [False, True])
def test_token_mean_is_2_6_over_any_split_and_never_2_0(split: bool) -> None:
    """Field bug 12: sequences of 1 and 4 tokens with losses 1 and 3; the mean of means would be 2.0."""
    problem, of = two_sequences((1.0, 3.0), (1, 4)), objective("reinforce")
    parts = [torch.tensor([0]), torch.arange(1, 5)] if split else [torch.arange(5)]
    normaliser = Normaliser.count(problem.batch)
    total = sum(run(of, select(problem, part), normaliser)[0].loss.item() for part in parts)
    assert total == pytest.approx(2.6, rel=1e-15)


def test_the_three_aggregations_on_known_numbers() -> None:
    problem = two_sequences((1.0, 3.0), (1, 4))
    losses = {
        kind: run(objective("reinforce", aggregation=kind), problem)[0].loss.item() for kind in AGGREGATIONS
    }
    assert losses == pytest.approx({"token_mean": 2.6, "sequence_mean_token_mean": 2.0, "sequence_sum": 6.5})


def test_rejected_tokens_count_in_the_denominator_unless_told_otherwise() -> None:
    problem = two_sequences((1.0, 3.0), (1, 4))
    rollout = problem.logprobs.clone()
    rollout[1:3] = -9.0  # r = e^8: outside dis's window
    batch = replace(problem.batch, rollout_logprobs=rollout)
    kept, dropped = (
        run(objective("dis", rejected_in_denominator=flag), Problem(problem.logprobs, batch))[0].loss.item()
        for flag in (True, False)
    )
    assert (kept, dropped) == pytest.approx(((1 + 3 + 3) / 5, (1 + 3 + 3) / 3))


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("placeholder", [float("nan"), float("-inf"), float("inf"), -9999.0])
def test_placeholders_off_the_mask_leave_loss_gradient_and_metrics_unchanged(
    name: str, placeholder: float
) -> None:
    """Field bug 13."""
    problem = random_problem(11, placeholders=False)
    of = objective(name, kl_coefficient=0.1, entropy_coefficient=0.01)
    entropy = torch.rand(problem.logprobs.numel(), dtype=torch.float64)
    clean, gradient = run(of, problem, entropy=entropy)
    batch, off = problem.batch, ~problem.action
    names = ("rollout_logprobs", "anchor_logprobs", "advantages", "reference_logprobs", "rewards")
    filled = {n: torch.where(off, placeholder, getattr(batch, n).double()) for n in names}
    poisoned = Problem(torch.where(off, placeholder, problem.logprobs), replace(batch, **filled))
    output, poisoned_gradient = run(of, poisoned, entropy=torch.where(off, placeholder, entropy))
    assert torch.isfinite(poisoned_gradient).all()
    torch.testing.assert_close(output.loss, clean.loss, rtol=0, atol=0)
    torch.testing.assert_close(poisoned_gradient, torch.where(off, 0.0, gradient), rtol=0, atol=0)
    torch.testing.assert_close(output.stats["statistics"], clean.stats["statistics"], rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_micro_batch_without_an_action_token_adds_zero(name: str) -> None:
    """Field bug 14, first half."""
    problem = random_problem(2)
    empty = replace(problem.batch, action_mask=torch.zeros_like(problem.action))
    of = objective(name, kl_coefficient=0.1)
    output, gradient = run(of, Problem(problem.logprobs, empty), Normaliser(tokens=17, sequences=2))
    assert output.loss.item() == 0.0
    assert gradient.abs().sum().item() == 0.0
    assert metrics_of(of, output) == {}


def test_a_batch_whose_every_token_is_rejected_has_exactly_no_gradient() -> None:
    """Field bug 14: an exact zero is what makes the engine skip the step; Adam's momentum would move the weights."""
    problem = random_problem(2, discrepancy=0.0)
    shifted = replace(problem.batch, rollout_logprobs=problem.batch.rollout_logprobs - 5.0)
    of = objective("decoupled", anchor="snapshot")
    output, gradient = run(of, Problem(problem.logprobs, shifted))
    assert output.loss.item() == 0.0
    assert torch.count_nonzero(gradient) == 0
    assert metrics_of(of, output)["masked"] == 1.0


def test_a_batch_that_accepts_no_token_says_so() -> None:
    """Field bug 14, second half: no step, and a message."""
    problem = random_problem(2, discrepancy=0.0)
    shifted = replace(problem.batch, rollout_logprobs=problem.batch.rollout_logprobs - 5.0)
    of = objective("decoupled", anchor="snapshot", rejected_in_denominator=False)
    with pytest.raises(EmptyBatch, match=r"none of the batch's \d+ action tokens.*no optimiser step"):
        of.prepare(shifted, problem.logprobs, lambda values: values)


def test_a_token_without_an_anchor_is_rejected_and_counted() -> None:
    problem = random_problem(4, placeholders=False)
    missing = torch.zeros_like(problem.action)
    missing[torch.nonzero(problem.action).squeeze(-1)[:3]] = True
    batch = replace(
        problem.batch, anchor_logprobs=torch.where(missing, torch.nan, problem.batch.anchor_logprobs)
    )
    of = objective("tis", anchor="snapshot")
    output, gradient = run(of, Problem(problem.logprobs, batch))
    shares = metrics_of(of, output)
    assert (gradient[missing] == 0).all()
    assert shares["anchor/absent"] == pytest.approx(3 / int(problem.action.sum()))
    assert shares["anchor/exact"] == pytest.approx(1 - shares["anchor/absent"])


def test_gspo_mean_runs_over_active_tokens_only() -> None:
    """Field bug 21: two action tokens with log ratios .2 and .4 among padding give s = e^.3."""
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    anchor = logprobs - torch.tensor([0.2, 5.0, 0.4, -7.0], dtype=torch.float64)
    action = torch.tensor([True, False, True, False])
    ids, ones = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.float64)
    batch = TokenBatch(anchor, anchor, ones, action, ids, ids)
    output, gradient = run(objective("gspo", anchor="start", clip_high=9.0), Problem(logprobs, batch))
    ratio = torch.tensor(0.3, dtype=torch.float64).exp().item()
    assert output.loss.item() == pytest.approx(-ratio)
    assert gradient.tolist() == pytest.approx([-ratio / 2, 0.0, -ratio / 2, 0.0])


@pytest.mark.parametrize(("kind", "value", "slope"), [
    ("k1", lambda d: d, lambda d: torch.ones_like(d)),
    ("k2", lambda d: d**2 / 2, lambda d: d),
    ("k3", lambda d: torch.exp(-d) + d - 1, lambda d: 1 - torch.exp(-d)),
])  # fmt: skip
def test_kl_estimators(kind: str, value: Any, slope: Any) -> None:
    problem = random_problem(8, placeholders=False)
    plain, plain_gradient = run(objective("ppo"), problem)
    output, gradient = run(objective("ppo", kl_coefficient=0.3, kl_estimator=kind), problem)
    action, count = problem.action, int(problem.action.sum())
    difference = problem.logprobs - problem.batch.reference_logprobs
    expected = 0.3 * torch.where(action, value(difference), 0.0).sum() / count
    expected_slope = 0.3 * torch.where(action, slope(difference), 0.0) / count
    torch.testing.assert_close(output.loss - plain.loss, expected, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(gradient - plain_gradient, expected_slope, rtol=1e-9, atol=1e-14)


def test_entropy_bonus_has_its_gradient() -> None:
    problem = random_problem(8, placeholders=False)
    entropy = torch.rand(problem.logprobs.numel(), dtype=torch.float64, requires_grad=True)
    of = objective("ppo", entropy_coefficient=0.05)
    of.loss(problem.logprobs, problem.batch, Normaliser.count(problem.batch), entropy=entropy).loss.backward()
    expected = -0.05 / int(problem.action.sum()) * problem.action.double()
    torch.testing.assert_close(entropy.grad, expected, rtol=1e-12, atol=0)


def test_an_overflowing_ratio_stays_finite_in_float32() -> None:
    """π_θ/μ = e^200 overflows float32; the loss and gradient must not."""
    problem = two_sequences((1.0, -1.0), (1, 4))
    batch = replace(
        problem.batch,
        rollout_logprobs=torch.full((5,), -200.0),
        anchor_logprobs=torch.full((5,), -200.0),
        advantages=problem.batch.advantages.float(),
        rewards=torch.zeros(5),
    )
    single = Problem(torch.full((5,), -0.1), batch)
    outcomes = {name: run(objective(name), single) for name in METHODS}
    assert all(torch.isfinite(o.loss) and torch.isfinite(g).all() for o, g in outcomes.values())


def test_bfloat16_log_probs_are_computed_in_float32() -> None:
    problem = random_problem(1, placeholders=False)
    half = Problem(problem.logprobs.bfloat16(), problem.batch)
    output, gradient = run(objective("ppo"), half)
    exact, _ = run(objective("ppo"), Problem(problem.logprobs.bfloat16().double(), problem.batch))
    assert gradient.dtype == torch.bfloat16
    # inputs are identical; what is left is the rounding of the float32 ratios
    torch.testing.assert_close(output.loss.double(), exact.loss.double(), rtol=1e-5, atol=1e-7)


def test_missing_inputs_are_named() -> None:
    problem = random_problem(1)
    normaliser = Normaliser.count(problem.batch)
    with pytest.raises(ValueError, match=r"sat.*the state of Objective.prepare"):
        objective("sat").loss(problem.logprobs, problem.batch, normaliser)
    bare = replace(problem.batch, anchor_logprobs=None, reference_logprobs=None, rewards=None)
    with pytest.raises(ValueError, match=r"anchor 'snapshot', but TokenBatch.anchor_logprobs is None"):
        objective("decoupled", anchor="snapshot").loss(problem.logprobs, bare, normaliser)
    with pytest.raises(ValueError, match="reference_logprobs"):
        objective("ppo", kl_coefficient=0.1).loss(problem.logprobs, bare, normaliser)
    with pytest.raises(ValueError, match="entropy"):
        objective("ppo", entropy_coefficient=0.1).loss(problem.logprobs, bare, normaliser)
    with pytest.raises(ValueError, match="rewards"):
        objective("topr").loss(problem.logprobs, bare, normaliser)


def test_start_anchor_without_scores_is_the_forward_itself() -> None:
    """Field bug 3: then r_s is 1 and the clip never acts, which the metrics show."""
    problem = random_problem(6, staleness=0.5)
    of = objective("ppo", anchor="start")
    output, _ = run(of, Problem(problem.logprobs, replace(problem.batch, anchor_logprobs=None)))
    shares = metrics_of(of, output)
    assert shares["log_staleness/mean_abs"] == 0.0
    assert shares["clipped_high"] == shares["clipped_low"] == 0.0


def test_illegal_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'decoupled'"):
        objective("decopled")
    with pytest.raises(ConfigError, match="min-clip"):
        objective("dis", dual_clip=3.0)
    with pytest.raises(ConfigError, match="not above 1"):
        objective("ppo", dual_clip=0.5)
