"""The metrics of the objective against plain numpy on the same tokens, by version gap, over any cut of the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_async.objectives import Normaliser, TokenBatch
from megatron_async.objectives.statistics import BINS, SIZE, _bins, bin_value, histogram_quantile, summarise
from tests.numerics.objective_batches import Problem, metrics_of, objective, random_problem, run

FLOAT32 = 2e-6  # per-token magnitudes are float32, sums float64


def direct(problem: Problem, rows: np.ndarray) -> dict[str, float]:
    """decoupled's metrics over the selected action tokens, from the definitions."""
    batch = problem.batch
    live, mu, old = (
        x.numpy()[rows] for x in (problem.logprobs, batch.rollout_logprobs, batch.anchor_logprobs)
    )
    advantage = batch.advantages.numpy()[rows]
    log_d, log_s, log_r = old - mu, live - old, live - mu
    masked = (np.exp(log_d) < 0.99) | (np.exp(log_d) > 1.01)
    high = ~masked & (advantage >= 0) & (np.exp(log_s) > 1.004)
    low = ~masked & (advantage < 0) & (np.exp(log_s) < 0.997)
    weight = np.where(masked, 0.0, np.exp(log_d))
    return {
        "tokens": float(rows.size),
        "log_discrepancy/mean_abs": np.abs(log_d).mean(),
        "log_staleness/mean_abs": np.abs(log_s).mean(),
        "log_total/mean_abs": np.abs(log_r).mean(),
        "kl_k3": (np.expm1(log_r) - log_r).mean(),
        "ess": weight.sum() ** 2 / (rows.size * (weight**2).sum()),
        "masked": masked.mean(),
        "clipped_high": high.mean(),
        "clipped_low": low.mean(),
        "active": (~masked & ~high & ~low).mean(),
    }


@pytest.fixture
def problem() -> Problem:
    return random_problem(0, discrepancy=0.01, staleness=0.006, lengths=(400, 1, 300))


def test_metrics_equal_their_definitions_in_total_and_by_gap(problem: Problem) -> None:
    of = objective("decoupled", anchor="snapshot")
    metrics = metrics_of(of, run(of, problem)[0])
    action, gap = problem.action.numpy(), problem.batch.version_gap.numpy()
    for label, rows in {"": action, **{f"/gap_{n}": action & (gap == n) for n in range(4)}}.items():
        expected = direct(problem, np.flatnonzero(rows))
        got = {name: metrics[name + label] for name in expected}
        # k3 of ratios near 1 is a difference of float32 numbers of size 1e-2: absolute error 1e-9
        assert got == pytest.approx(expected, rel=FLOAT32, abs=2e-9), label
    assert metrics["engine_noise"] == metrics["log_discrepancy/mean_abs/gap_0"]
    assert metrics["anchor/exact"] == 1.0


def test_p99_is_within_a_bin_of_the_exact_quantile(problem: Problem) -> None:
    of = objective("decoupled", anchor="snapshot")
    metrics = metrics_of(of, run(of, problem)[0])
    live, mu, old = (
        x[problem.action]
        for x in (problem.logprobs, problem.batch.rollout_logprobs, problem.batch.anchor_logprobs)
    )
    for name, values in {
        "log_discrepancy": old - mu,
        "log_staleness": live - old,
        "log_total": live - mu,
    }.items():
        exact = np.quantile(values.abs().numpy(), 0.99, method="inverted_cdf")
        assert metrics[f"{name}/p99_abs"] == pytest.approx(exact, rel=0.065)


def test_every_bin_holds_its_own_middle() -> None:
    middles = torch.tensor([bin_value(index) for index in range(BINS)])
    assert _bins(middles).tolist() == list(range(BINS))
    extremes = torch.tensor([0.0, 1e-30, 1e30])
    assert _bins(extremes).tolist() == [0, 0, BINS - 1]


def test_histogram_quantile_of_known_counts() -> None:
    counts = [0.0] * BINS
    counts[40], counts[100] = 99.0, 1.0
    assert histogram_quantile(counts, 0.99) == bin_value(40)
    assert histogram_quantile(counts, 0.995) == bin_value(100)
    assert histogram_quantile([0.0] * BINS, 0.99) == 0.0


def test_one_vector_of_fixed_size_is_all_there_is_to_reduce() -> None:
    sizes = {
        run(objective(name), random_problem(1, lengths=lengths))[0].stats["statistics"].shape
        for name in ("ppo", "sat", "gspo")
        for lengths in ((5, 1), (50, 1, 80))
    }
    assert sizes == {torch.Size([SIZE])}


def test_staleness_in_versions_and_seconds(problem: Problem) -> None:
    gap = torch.where(
        problem.action, torch.arange(problem.logprobs.numel()) % 12, 10_000
    )  # padding must not count
    age = torch.where(problem.action, 3.0 + gap.double(), torch.nan)
    batch = replace(problem.batch, version_gap=gap, age_seconds=age)
    of = objective("ppo")
    metrics = metrics_of(of, run(of, Problem(problem.logprobs, batch))[0])
    on = problem.action
    assert metrics["staleness/versions_min"] == 0.0
    assert metrics["staleness/versions_max"] == 11.0
    assert metrics["staleness/versions_mean"] == pytest.approx(gap[on].double().mean().item())
    assert metrics["staleness/seconds_mean"] == pytest.approx(age[on].mean().item())
    assert metrics["staleness/seconds_min"] == pytest.approx(3.0, rel=0.065)  # a histogram bin
    assert metrics["staleness/seconds_max"] == pytest.approx(14.0, rel=0.065)
    assert metrics["tokens/gap_8+"] == int((on & (gap >= 8)).sum())


def test_shares_of_exact_approximate_and_absent_anchors(problem: Problem) -> None:
    """`start` is exact at gap 0; a NaN anchor is absent."""
    missing = problem.action & (problem.batch.version_gap == 3)
    batch = replace(
        problem.batch, anchor_logprobs=problem.batch.anchor_logprobs.masked_fill(missing, torch.nan)
    )
    of = objective("tis", anchor="start")
    metrics = metrics_of(of, run(of, Problem(problem.logprobs, batch))[0])
    shares = {
        n: (problem.action & (batch.version_gap == n)).sum().item() / int(problem.action.sum())
        for n in range(4)
    }
    got = {name: metrics[f"anchor/{name}"] for name in ("exact", "approximate", "absent")}
    assert got == pytest.approx(
        {"exact": shares[0], "approximate": shares[1] + shares[2], "absent": shares[3]}
    )


def test_flagged_tokens_override_the_anchors_name(problem: Problem) -> None:
    """Tokens whose KV came from another version are not exact, although the anchor is."""
    flagged = torch.arange(problem.logprobs.numel()) % 2 == 0
    batch = replace(problem.batch, anchor_exact=~flagged)
    of = objective("decoupled", anchor="snapshot")
    metrics = metrics_of(of, run(of, Problem(problem.logprobs, batch))[0])
    expected = (problem.action & ~flagged).sum().item() / int(problem.action.sum())
    assert metrics["anchor/exact"] == pytest.approx(expected)


def test_metrics_can_be_left_out_and_an_empty_vector_says_nothing() -> None:
    problem = random_problem(1)
    of = objective("ppo")
    batch: TokenBatch = problem.batch
    output = of.loss(problem.logprobs, batch, Normaliser.count(batch), metrics=False)
    assert output.stats == {}
    assert metrics_of(of, output) == {}
    assert summarise(torch.zeros(SIZE)) == {}
    counted = run(of, problem)[0]
    assert all(name.startswith("objective/") for name in of.summarise(counted.stats))
