"""PPO-EWMA's recursion: normalised, closed form, centre of mass, reset, resume."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.old_logits.ewma import ActiveFractionReset, WeightAverage, beta_of_window


def walk(steps: int, seed: int = 0) -> list[list[torch.Tensor]]:
    """θ(0), θ(1), ...: two float32 tensors that drift."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    history = [weights]
    for _ in range(steps):
        weights = [w + 0.1 * torch.randn(w.shape, generator=generator) for w in weights]
        history.append(weights)
    return history


@given(beta=st.floats(0.0, 0.99), value=st.floats(-100, 100, width=32))
def test_a_constant_stays_itself_at_every_step(beta: float, value: float) -> None:
    """Field bug 20: without normalisation β = .75 gives .25, .44, .58, .68 of it."""
    weights = [torch.full((4,), value)]
    average = WeightAverage(weights, beta)
    for _ in range(30):
        average.update(weights)
        assert torch.equal(average.values[0], weights[0])


@pytest.mark.parametrize("beta", [0.0, 0.6, 0.75, 0.95])
def test_recursion_equals_the_closed_form(beta: float) -> None:
    history = walk(25)
    average = WeightAverage(history[0], beta)
    for t in range(1, len(history)):
        average.update(history[t])
        factors = [beta ** (t - k) for k in range(t + 1)]
        for i, value in enumerate(average.values):
            terms = sum(f * history[k][i].double() for k, f in enumerate(factors))
            # 25 float32 roundings of numbers near 1
            torch.testing.assert_close(value.double(), terms / sum(factors), rtol=2e-6, atol=2e-6)
        assert average.weight == pytest.approx(sum(factors), rel=1e-14)


def test_the_recursion_of_the_paper_in_float64() -> None:
    """w ← 1 + β w_old; θ_prox ← θ/w + β (w_old/w) θ_prox, written out."""
    beta, history = 0.75, walk(12)
    average, w, prox = WeightAverage(history[0], beta), 1.0, history[0][0].double()
    for weights in history[1:]:
        average.update(weights)
        w_old, w = w, 1 + beta * w
        prox = weights[0].double() / w + beta * (w_old / w) * prox
        torch.testing.assert_close(average.values[0].double(), prox, rtol=2e-6, atol=2e-6)  # float32


def test_centre_of_mass_table() -> None:
    """Published for β = .75 at t = 1, 2, 3, 5, 10, 20."""
    average, weights, seen = WeightAverage([torch.zeros(1)], 0.75), [torch.zeros(1)], {}
    for t in range(1, 21):
        average.update(weights)
        seen[t] = average.centre_of_mass
    published = {1: 0.43, 2: 0.81, 3: 1.15, 5: 1.70, 10: 2.51, 20: 2.95}
    assert {t: seen[t] for t in published} == pytest.approx(published, abs=0.0051)  # two published decimals


@pytest.mark.parametrize(("window", "beta"), [(6, 0.75), (3, 0.6), (0, 0.0)])
def test_beta_from_the_staleness_window(window: int, beta: float) -> None:
    assert beta_of_window(window) == pytest.approx(beta)
    assert beta / (1 - beta) == pytest.approx(window / 2)  # the limit of the centre of mass


def test_auto_reset_after_patience_consecutive_steps() -> None:
    history = walk(6)
    average = WeightAverage(history[0], 0.75, ActiveFractionReset(threshold=0.9, patience=2))
    outcomes = []
    for weights, active in zip(history[1:], [0.85, 0.95, 0.85, 0.89, 0.85, 0.99], strict=True):
        average.update(weights)
        outcomes.append(average.observe(active, weights))
    assert outcomes == [False, False, False, True, False, False]
    assert average.metrics()["ewma/resets"] == 1.0
    assert average.steps == 2


def test_a_reset_makes_the_average_the_current_weights() -> None:
    history = walk(5)
    average = WeightAverage(history[0], 0.75)
    for weights in history[1:]:
        average.update(weights)
    average.reset(history[-1])
    assert all(torch.equal(a, b) for a, b in zip(average.values, history[-1], strict=True))
    assert (average.weight, average.centre_of_mass) == (1.0, 0.0)
    history[-1][0].add_(1.0)
    assert not torch.equal(average.values[0], history[-1][0]), "the average must own its memory"


def test_the_default_threshold_is_strict() -> None:
    rule = ActiveFractionReset()
    assert [rule.observe(active) for active in (0.9, 0.8999, 1.0)] == [False, True, False]


def test_a_resumed_average_goes_on_bit_for_bit() -> None:
    history = walk(10)
    straight = WeightAverage(history[0], 0.75, ActiveFractionReset(0.9, 3))
    for weights in history[1:6]:
        straight.update(weights)
    straight.observe(0.5, history[5])
    saved = {
        key: [v.clone() for v in value] if key == "values" else value
        for key, value in straight.state_dict().items()
    }
    resumed = WeightAverage(history[0], 0.75, ActiveFractionReset(0.9, 3))
    resumed.load_state_dict(saved)
    for average in (straight, resumed):
        for weights in history[6:]:
            average.update(weights)
    assert all(torch.equal(a, b) for a, b in zip(straight.values, resumed.values, strict=True))
    assert resumed.metrics() == straight.metrics()
    assert resumed.rule.below == 1


def test_wrong_inputs_are_refused() -> None:
    average = WeightAverage([torch.zeros(3)], 0.5)
    with pytest.raises(ValueError, match=r"holds 1 tensors, it was given 2"):
        average.update([torch.zeros(3), torch.zeros(1)])
    with pytest.raises(ValueError, match=r"\(3,\), \(4,\)"):
        average.reset([torch.zeros(4)])
    with pytest.raises(ValueError, match="beta is 1"):
        WeightAverage([torch.zeros(3)], 1.0)
    with pytest.raises(ValueError, match="keep the saved one"):
        average.load_state_dict({**average.state_dict(), "beta": 0.6})
    with pytest.raises(ValueError, match="reset_threshold is 2"):
        ActiveFractionReset(2.0)
    with pytest.raises(ValueError, match="at least 0"):
        beta_of_window(-1)


def test_bfloat16_weights_are_averaged_in_float32() -> None:
    average = WeightAverage([torch.ones(2, dtype=torch.bfloat16)], 0.75)
    average.update([torch.ones(2, dtype=torch.bfloat16) * 1.0078125])
    assert average.values[0].dtype == torch.float32
    assert average.values[0][0].item() == pytest.approx(1 + 0.0078125 / 1.75, rel=1e-7)
