"""Advantages and critic's targets of whole batches, and the critic's loss, against loops in Python floats."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_async.advantages.targets import Episodes, gae_targets
from megatron_async.config.schema import AdvantageConfig, CriticConfig
from megatron_async.objectives.value import value_loss

GAE = AdvantageConfig(name="gae", lambda_policy=0.9, lambda_critic=1.0)


def make_episodes(seed: int = 0, trajectories: int = 5) -> Episodes:
    """Trajectories of some turns with observations around them; the reward on the last token, often an observation."""
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("mask", "ids", "turns", "rewards")}
    for index in range(trajectories):
        turns, mask = [torch.full((2,), -1)], [torch.zeros(2)]
        for turn in range(int(torch.randint(1, 4, (), generator=generator))):
            actions, seen = torch.randint(1, 6, (2,), generator=generator).tolist()
            mask += [torch.ones(actions), torch.zeros(seen)]
            turns += [torch.full((actions,), turn), torch.full((seen,), -1)]
        parts["mask"].append(torch.cat(mask).bool())
        parts["turns"].append(torch.cat(turns))
        length = len(parts["mask"][-1])
        parts["ids"].append(torch.full((length,), index))
        reward = torch.zeros(length, dtype=torch.float64)
        reward[-1] = torch.rand((), generator=generator, dtype=torch.float64)
        parts["rewards"].append(reward)
    ids = torch.cat(parts["ids"])
    return Episodes(
        rewards=torch.cat(parts["rewards"]),
        values=torch.randn(len(ids), generator=generator, dtype=torch.float64),
        after=torch.randn(trajectories, generator=generator, dtype=torch.float64)[ids],
        action_mask=torch.cat(parts["mask"]),
        sequence_ids=ids,
        truncated=(ids % 2 == 0),
        turn_ids=torch.cat(parts["turns"]),
    )


def loop(episodes: Episodes, gamma: float, lam: float | None, *, bootstrap: bool = False) -> list[float]:
    """Advantages by a loop over each trajectory's action tokens; lam None is the adaptive one with α = 1.5."""
    out = [0.0] * len(episodes.values)
    for index in range(int(episodes.sequence_ids.max()) + 1):
        tokens = torch.nonzero(episodes.sequence_ids == index).squeeze(-1).tolist()
        actions = [t for t in tokens if episodes.action_mask[t]]
        decay = 1 - 1 / (1.5 * len(actions)) if lam is None else lam
        reward = float(episodes.rewards[tokens].sum())  # all of it lies behind the last action
        following = float(episodes.after[tokens[0]]) if bootstrap and episodes.truncated[tokens[0]] else 0.0
        carried = 0.0
        for t in reversed(actions):
            value = float(episodes.values[t])
            carried = reward + gamma * following - value + gamma * decay * carried
            out[t], following, reward = carried, value, 0.0
    return out


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize(("lam", "expected"), [(0.9, 0.9), ("adaptive", None), (0.0, 0.0)])
def test_advantages_equal_the_loop(lam: float | str, expected: float | None, bootstrap: bool) -> None:
    config = replace(GAE, lambda_policy=lam, gamma=0.98, bootstrap_truncated=bootstrap)
    for seed in range(5):
        episodes = make_episodes(seed)
        target = torch.tensor(loop(episodes, 0.98, expected, bootstrap=bootstrap), dtype=torch.float64)
        got = gae_targets(config, episodes).advantages
        torch.testing.assert_close(got, target, rtol=1e-11, atol=1e-12)


def test_lambda_critic_of_one_gives_monte_carlo_returns() -> None:
    """Whatever the values are: each action token's target is its trajectory's reward."""
    episodes = make_episodes(3)
    rewards = torch.zeros(5, dtype=torch.float64).index_add_(0, episodes.sequence_ids, episodes.rewards)
    got = gae_targets(GAE, episodes).returns
    expected = torch.where(episodes.action_mask, rewards[episodes.sequence_ids], 0.0)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def test_truncation_bootstraps_only_the_truncated() -> None:
    episodes = make_episodes(4)
    config = replace(GAE, bootstrap_truncated=True)
    got = gae_targets(config, episodes).returns - gae_targets(GAE, episodes).returns
    expected = torch.where(episodes.action_mask & episodes.truncated, episodes.after, 0.0)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_step_values_make_a_turn_one_decision(kind: str) -> None:
    """Equal to a loop over turns whose values are the mean or the last of their tokens; all tokens of a turn share."""
    config = replace(GAE, values=f"step_{kind}", lambda_policy="adaptive", gamma=0.97)  # type: ignore[arg-type]
    episodes = make_episodes(6)
    got = gae_targets(config, episodes).advantages
    for index in range(5):
        own = episodes.sequence_ids == index
        turns = [own & (episodes.turn_ids == turn) for turn in range(int(episodes.turn_ids[own].max()) + 1)]
        values = [
            float(episodes.values[turn].mean() if kind == "mean" else episodes.values[turn][-1])
            for turn in turns
        ]
        lam, carried, following, reward = (
            1 - 1 / (1.5 * len(turns)),
            0.0,
            0.0,
            float(episodes.rewards[own].sum()),
        )
        for turn, value in zip(reversed(turns), reversed(values), strict=True):
            carried = reward + 0.97 * following - value + 0.97 * lam * carried
            following, reward = value, 0.0
            assert got[turn].tolist() == pytest.approx([carried] * int(turn.sum()), rel=1e-11)


def test_whitened_advantages_are_standard() -> None:
    episodes = make_episodes(8)
    got = gae_targets(replace(GAE, whiten=True), episodes).advantages[episodes.action_mask]
    assert float(got.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(got.std()) == pytest.approx(1.0, rel=1e-6)


def reference_loss(config: CriticConfig, value: float, target: float, old: float) -> float:
    def regression(error: float) -> float:
        if config.loss == "mse":
            return error * error / 2
        bend = config.huber_delta
        return error * error / 2 if abs(error) <= bend else bend * (abs(error) - bend / 2)

    plain = regression(value - target)
    if config.value_clip is None:
        return plain
    moved = min(max(value - old, -config.value_clip), config.value_clip)
    return max(plain, regression(old + moved - target))


@pytest.mark.parametrize("loss", ["mse", "huber"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_and_gradient_equal_a_loop(loss: str, clip: float | None) -> None:
    config = CriticConfig(loss=loss, huber_delta=0.7, value_clip=clip)  # type: ignore[arg-type]
    torch.manual_seed(1)
    values, returns, old = torch.randn(3, 40, dtype=torch.float64).unbind(0)
    mask = torch.rand(40) > 0.3
    returns = torch.where(mask, returns, torch.nan)  # what stands off the mask must not enter
    leaf = values.clone().requires_grad_()
    got = value_loss(config, leaf, returns, old, mask, tokens=100)
    got.loss.backward()
    on = torch.nonzero(mask).squeeze(-1).tolist()

    def total(shift: float, at: int) -> float:
        return sum(
            reference_loss(config, float(values[t]) + (shift if t == at else 0.0), float(returns[t]), float(old[t]))
            for t in on
        ) / 100  # fmt: skip

    assert got.loss.item() == pytest.approx(total(0.0, -1), rel=1e-12)
    for t in range(40):
        slope = (total(1e-6, t) - total(-1e-6, t)) / 2e-6 if mask[t] else 0.0
        assert leaf.grad is not None
        assert float(leaf.grad[t]) == pytest.approx(slope, abs=1e-8)  # central difference


def test_a_clipped_value_stops_pulling() -> None:
    config = CriticConfig(value_clip=0.1)
    values = torch.tensor([0.5, 0.05], requires_grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    result = value_loss(config, values, torch.ones(2), torch.zeros(2), mask, tokens=2)
    result.loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.475])
    assert float(result.stats["clipped"]) == 1.0
