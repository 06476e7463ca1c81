"""Advantages keyed by group id: against closed forms, with declared singletons."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.advantages import AdvantageError, build_advantage, informative_groups, whiten
from megatron_async.advantages.estimator import AdvantageEstimator
from megatron_async.advantages.groups import STD_EPSILON
from megatron_async.config.errors import ConfigError
from megatron_async.config.methods import ADVANTAGES
from megatron_async.config.schema import AdvantageConfig

GROUPED = ("grpo", "dr_grpo", "rloo")


def estimator(name: str, **settings: Any) -> AdvantageEstimator:
    return build_advantage(AdvantageConfig(name=name, **settings))


@pytest.mark.parametrize("name", GROUPED)
def test_seven_of_eight_samples_present_give_zero_everywhere(name: str) -> None:
    """Field bug 15: group A all 1, group B all 0, one sample of B missing, members interleaved."""
    rewards, groups = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0], ["A", "B", "A", "A", "B", "A", "B"]
    assert estimator(name)(rewards, groups) == [0.0] * 7


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_five_and_three(name: str) -> None:
    groups = ["A", "B", "A", "A", "B", "A", "B", "A"]
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.5]
    got = estimator(name)(rewards, groups)
    for group in "AB":
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean, n = statistics.fmean(members), len(members)
        expected = {
            "grpo": [(r - mean) / (statistics.stdev(members) + STD_EPSILON) for r in members],
            "dr_grpo": [r - mean for r in members],
            "rloo": [r - (sum(members) - r) / (n - 1) for r in members],
        }[name]
        assert [a for a, g in zip(got, groups, strict=True) if g == group] == pytest.approx(
            expected, rel=1e-12
        )


def test_grpo_without_std_is_dr_grpo() -> None:
    rewards, groups = [0.3, 0.9, 0.1, 0.4], ["a", "a", "b", "b"]
    assert estimator("grpo", normalise_std=False)(rewards, groups) == estimator("dr_grpo")(rewards, groups)


@pytest.mark.parametrize("name", [*GROUPED, "batch_mean"])
@given(
    rows=st.lists(st.tuples(st.floats(-10, 10), st.sampled_from("abc")), min_size=2, max_size=20),
    seed=st.integers(0, 1000),
)
def test_order_changes_nothing_and_a_baseline_leaves_no_mean(
    name: str, rows: list[tuple[float, str]], seed: int
) -> None:
    shuffled = rows.copy()
    random.Random(seed).shuffle(shuffled)
    compute = estimator(name, singleton="zero", normalise_std=False)
    first = {row: a for row, a in zip(rows, compute([r for r, _ in rows], [g for _, g in rows]), strict=True)}
    second = compute([r for r, _ in shuffled], [g for _, g in shuffled])
    assert second == pytest.approx([first[row] for row in shuffled], rel=1e-9, abs=1e-9)
    assert sum(second) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, -2.3])
def test_equal_rewards_are_exactly_zero_whatever_the_rounding(reward: float) -> None:
    for name in (*GROUPED, "batch_mean"):
        assert estimator(name)([reward] * 7, ["g"] * 7) == [0.0] * 7


@pytest.mark.parametrize("name", GROUPED)
def test_a_lone_sample_follows_its_declared_policy(name: str) -> None:
    rewards, groups, prompts = [1.0, 0.0, 0.8], ["A", "A", "lone"], ["p", "p", "q"]
    with pytest.raises(AdvantageError, match=r"group 'lone' has one trajectory.*singleton"):
        estimator(name, singleton="error")(rewards, groups)
    assert estimator(name, singleton="zero")(rewards, groups)[2] == 0.0
    running = estimator(name, singleton="running_mean")
    running([0.2, 0.4], ["x", "x"], ["q", "q"])
    assert running(rewards, groups, prompts)[2] == pytest.approx(0.8 - 0.3)


def test_running_mean_compares_with_the_latest_rewards_of_the_prompt_before_this_batch() -> None:
    compute = estimator("running_mean", window=3)
    compute([1.0, 0.0, 0.0, 1.0], list("abcd"), ["p"] * 4)
    got = compute([1.0, 0.0], ["e", "f"], ["p", "p"])
    mean = (0.0 + 0.0 + 1.0) / 3  # the window drops the oldest; the batch's own rewards are not in it
    assert got == pytest.approx([1.0 - mean, 0.0 - mean])


def test_a_new_prompt_is_compared_with_the_rest_of_the_batch() -> None:
    got = estimator("running_mean")([1.0, 0.0, 0.5], list("abc"), list("pqr"))
    assert got == pytest.approx([1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5])


def test_a_first_batch_of_one_has_nothing_to_compare_with() -> None:
    with pytest.raises(AdvantageError, match="one trajectory"):
        estimator("running_mean")([1.0], ["a"], ["p"])


def test_latest_mean_recovers_after_the_reward_shifts() -> None:
    """When 0/1 rewards flip, the baseline follows within its window (arXiv 2607.07508, online simulation)."""
    compute = estimator("latest_mean", window=128)
    for _ in range(8):
        compute([1.0] * 32, ["g"] * 32)
    after = [compute([0.0] * 32, ["g"] * 32)[0] for _ in range(6)]
    assert after == pytest.approx([-1.0, -0.75, -0.5, -0.25, 0.0, 0.0])


def test_default_windows_are_those_of_the_paper() -> None:
    assert estimator("running_mean").config.window == 8
    assert estimator("latest_mean").config.window == 128


def test_running_baselines_survive_a_resume() -> None:
    straight, resumed = estimator("running_mean", window=3), estimator("running_mean", window=3)
    straight([1.0, 0.0, 0.5], list("abc"), list("ppq"))
    resumed.load_state_dict(straight.state_dict())
    batch = ([0.3, 0.6], ["d", "e"], ["p", "q"])
    assert resumed(*batch) == straight(*batch)
    assert resumed.state_dict() == straight.state_dict()


def test_batch_mean() -> None:
    rewards = [1.0, 0.0, 0.0, 0.6]
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    got = estimator("batch_mean")(rewards, list("abcd"))
    assert got == pytest.approx([(r - mean) / (deviation + STD_EPSILON) for r in rewards])
    assert estimator("batch_mean")([0.7], ["a"]) == [0.0]


def test_group_filter_names_the_groups_with_a_signal() -> None:
    assert informative_groups([1, 1, 0, 1, 0, 0, 0.5], ["A", "A", "B", "B", "C", "C", "D"]) == {"B"}


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_failure_is_not_a_reward(reward: Any) -> None:
    with pytest.raises(AdvantageError, match="trajectory 1 of group 'b' has reward"):
        estimator("batch_mean")([1.0, reward], ["a", "b"])


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(AdvantageError, match="2 rewards, 1 group ids"):
        estimator("grpo")([1.0, 0.0], ["a"])
    with pytest.raises(AdvantageError, match="prompt_ids must be given"):
        estimator("running_mean")([1.0, 0.0], ["a", "b"])
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        estimator("grop")


def test_every_listed_estimator_is_implemented() -> None:
    """Field bug 23: the names have one home."""
    batch = ([1.0, 0.0, 0.5, 0.0], ["a", "a", "b", "b"], ["p", "p", "q", "q"])
    scalar = [name for name, entry in ADVANTAGES.items() if not entry.needs_critic]
    assert all(len(estimator(name)(*batch)) == 4 for name in scalar)


@pytest.mark.parametrize("active", [0, 1])
def test_whitening_one_active_token_or_none_is_zero(active: int) -> None:
    """Field bug 16."""
    mask = torch.arange(5) < active
    values = torch.where(mask, 3.0, float("nan"))
    assert whiten(values, mask).tolist() == [0.0] * 5


def test_whitening_over_ranks_equals_whitening_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, generator=generator, dtype=torch.float64) * 3 + 5
    mask = torch.rand(40, generator=generator) > 0.4
    whole = whiten(values, mask)
    assert whole[mask].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert whole[mask].std().item() == pytest.approx(1.0, rel=1e-7)  # epsilon 1e-8 beside a deviation of 3
    halves = [slice(0, 13), slice(13, 40)]
    moments = []
    for half in halves:
        whiten(values[half], mask[half], reduce_sum=lambda m: moments.append(m) or m)
    total = moments[0] + moments[1]
    parts = [whiten(values[half], mask[half], reduce_sum=lambda _: total) for half in halves]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    kept = whiten(values, mask, shift_mean=False)
    assert kept[mask].mean().item() == pytest.approx(values[mask].mean().item())
