"""GAE over action tokens against a loop in Python floats (arXiv 2607.07508)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.advantages import (
    explained_variance,
    length_adaptive_lambda,
    skip_observation_gae,
    step_values,
)


def loop(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float, bootstrap: float
) -> list[float]:
    """Advantages of one sequence, backwards over its action tokens; a reward belongs to the last action before it."""
    actions = [t for t in range(len(mask)) if mask[t]]
    earned = {t: 0.0 for t in actions}
    for t, reward in enumerate(rewards):
        owner = max((a for a in actions if a <= t), default=None)
        if owner is not None:
            earned[owner] += reward
    out, following, carried = [0.0] * len(mask), bootstrap, 0.0
    for t in reversed(actions):
        carried = earned[t] + gamma * following - values[t] + gamma * lam * carried
        out[t], following = carried, values[t]
    return out


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=5),
    gamma=st.sampled_from([1.0, 0.97]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    truncated=st.booleans(),
)
def test_packed_sequences_equal_the_loop(
    seed: int, lengths: list[int], gamma: float, lam: float, truncated: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.repeat_interleave(torch.arange(len(lengths)) * 3, torch.tensor(lengths))
    mask = torch.rand(total, generator=generator) > 0.4
    mask[(torch.tensor(lengths).cumsum(0) - torch.tensor(lengths))] = True  # rewards come after some action
    values = torch.randn(total, generator=generator, dtype=torch.float64)
    rewards = torch.randn(total, generator=generator, dtype=torch.float64)
    bootstrap = torch.full((total,), 0.7, dtype=torch.float64) if truncated else None
    got, returns = skip_observation_gae(rewards, values, mask, ids, gamma=gamma, lam=lam, bootstrap=bootstrap)
    expected, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        rows_as_lists = (rewards[rows].tolist(), values[rows].tolist(), mask[rows].tolist())
        expected += loop(*rows_as_lists, gamma, lam, 0.7 if truncated else 0.0)
        start += length
    target = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got, target, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(returns, torch.where(mask, target + values, 0.0), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("observations", [0, 10, 100, 1000])
def test_the_first_advantage_does_not_depend_on_the_observations_between(observations: int) -> None:
    """Field bug 17: λ = .95 once over the gap, where others give .95, .569, .0056, 0."""
    mask = torch.tensor([True] + [False] * observations + [True])
    rewards, values = torch.zeros(len(mask)), torch.zeros(len(mask))
    rewards[-1] = 1.0
    values[1:-1] = 9.0  # a critic's values on observations must not enter
    got, _ = skip_observation_gae(rewards, values, mask, torch.zeros(len(mask), dtype=torch.int64), lam=0.95)
    assert got[0].item() == pytest.approx(0.95)
    assert got[1:-1].abs().sum().item() == 0.0


def test_a_reward_on_a_trailing_observation_reaches_the_actions() -> None:
    """Field bug 18: returns [1, 1], not [0, 0]."""
    mask = torch.tensor([True, True, False])
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.zeros(3)
    _, returns = skip_observation_gae(rewards, values, mask, torch.zeros(3, dtype=torch.int64))
    assert returns.tolist() == [1.0, 1.0, 0.0]


def test_a_reward_before_any_action_is_refused() -> None:
    with pytest.raises(ValueError, match="before the first action"):
        skip_observation_gae(
            torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([False, True]), torch.zeros(2).long()
        )


def test_no_action_token_gives_zeros() -> None:
    advantages, returns = skip_observation_gae(
        torch.zeros(3), torch.ones(3), torch.zeros(3).bool(), torch.zeros(3).long()
    )
    assert advantages.tolist() == returns.tolist() == [0.0] * 3


def test_length_adaptive_lambda() -> None:
    ids = torch.tensor([0] * 5 + [1] * 2)
    mask = torch.tensor([True, False, True, True, True, True, False])
    got = length_adaptive_lambda(mask, ids, alpha=1.5)
    assert got[0].item() == pytest.approx(1 - 1 / (1.5 * 4))
    assert got[5].item() == pytest.approx(1 - 1 / 1.5)


def test_length_adaptive_lambda_enters_the_recursion_per_sequence() -> None:
    ids = torch.tensor([0, 0, 0, 1, 1])
    mask = torch.ones(5, dtype=torch.bool)
    rewards, values = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0]).double(), torch.zeros(5).double()
    lam = length_adaptive_lambda(mask, ids)
    got, _ = skip_observation_gae(rewards, values, mask, ids, lam=lam)
    first, second = 1 - 1 / 4.5, 1 - 1 / 3.0
    assert got.tolist() == pytest.approx([first**2, first, 1.0, second, 1.0])


@pytest.mark.parametrize(
    ("kind", "expected"), [("mean", [1.5, 1.5, 0, 5.0, 5.0, 0]), ("last", [2.0, 2.0, 0, 6.0, 6.0, 0])]
)
def test_step_values(kind: str, expected: list[float]) -> None:
    values = torch.tensor([1.0, 2.0, 9.0, 4.0, 6.0, math.nan])
    mask = torch.tensor([True, True, False, True, True, False])
    turns = torch.tensor([0, 0, 0, 1, 1, 1])
    assert step_values(values, mask, torch.zeros(6).long(), turns, kind).tolist() == expected


def test_step_values_refuses_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="'mean' or 'last'"):
        step_values(
            torch.zeros(1), torch.ones(1).bool(), torch.zeros(1).long(), torch.zeros(1).long(), "first"
        )


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, math.nan])
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.ones(4), returns, mask) == pytest.approx(0.0)
    assert math.isnan(explained_variance(returns, torch.ones(4), mask))


def test_a_long_sequence_costs_logarithmic_passes_and_stays_exact() -> None:
    size = 5000
    rewards = torch.zeros(size, dtype=torch.float64)
    rewards[-1] = 1.0
    mask, ids = torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64)
    got, _ = skip_observation_gae(rewards, torch.zeros(size).double(), mask, ids, lam=0.999)
    expected = 0.999 ** torch.arange(size - 1, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=0)
