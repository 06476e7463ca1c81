"""Every preset against an independent float64 reference: value, gradient, and both sides of every threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.config.methods import METHODS
from megatron_async.objectives import Normaliser
from tests.numerics.objective_batches import Problem, metrics_of, objective, prepared, random_problem, run
from tests.numerics.objective_reference import REFERENCES, Settings, Token, aggregate

# float64 sums of about a hundred terms in another order: 1e-13 in practice.
RELATIVE = 1e-10


@dataclass(frozen=True)
class Case:
    """A preset's configuration, the same thresholds for the reference, and the scales that reach both sides of them."""

    name: str
    settings: Settings
    config: dict[str, Any] = field(default_factory=dict)
    scales: dict[str, Any] = field(default_factory=dict)
    sides: tuple[str, ...] = ()
    label: str = ""


CLIPS = ("clipped_high", "clipped_low")
TIGHT = {"discrepancy": 0.01, "staleness": 0.006}
MANY_SEQUENCES = {"staleness": 0.003, "lengths": (30, 1, 25, 40, 12, 20, 8, 18)}
CASES = [
    Case("reinforce", Settings()),
    Case("ppo", Settings(), {"anchor": "start"}, sides=CLIPS),
    Case("ppo", Settings(), {"anchor": "rollout"}, sides=CLIPS, label="coupled"),
    Case(
        "ppo",
        Settings(eps=(0.1, 0.4), dual=1.3),
        {"anchor": "snapshot", "clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.3},
        sides=CLIPS,
        label="clip_higher_dual",
    ),
    Case(
        "decoupled",
        Settings(mask=(0.990, 1.010), eps=(0.003, 0.004), weight="discrepancy"),
        {"anchor": "snapshot"},
        TIGHT,
        (*CLIPS, "masked"),
    ),
    Case(
        "decoupled",
        Settings(mask=(0.5, 1.5)),
        {"weight": "none", "mask_low": 0.5, "mask_high": 1.5, "clip_low": 0.2, "clip_high": 0.2},
        sides=(*CLIPS, "masked"),
        label="unweighted",
    ),
    Case("tis", Settings(weight="truncated", cap=1.2), {"options": {"cap": 1.2}}, sides=CLIPS),
    Case(
        "mis",
        Settings(mask=(0.5, 2.0), weight="discrepancy", veto=0.5),
        {"options": {"veto": 0.5}},
        {"discrepancy": 0.35},
        ("masked",),
        label="token_veto",
    ),
    Case(
        "mis",
        Settings(mask=(0.5, 2.0), weight="discrepancy", level="sequence"),
        {"options": {"level": "sequence", "veto": 0.0}},
        {"discrepancy": 0.15},
        (*CLIPS, "masked"),
        label="sequence",
    ),
    Case(
        "mis",
        Settings(mask=(0.999, 1.001), weight="discrepancy", level="geometric", veto=1e-4),
        {"options": {"level": "geometric"}},
        {"discrepancy": 0.003},
        (*CLIPS, "masked"),
        label="geometric",
    ),
    Case(
        "icepop",
        Settings(mask=(0.5, 5.0), weight="discrepancy"),
        {},
        {"discrepancy": 0.9},
        (*CLIPS, "masked"),
    ),
    Case("gspo", Settings(eps=(3e-4, 4e-4)), {"anchor": "start"}, MANY_SEQUENCES, CLIPS),
    Case(
        "gspo",
        Settings(eps=(3e-4, 4e-4), weight="truncated", mask=(0.8, 1.3), cap=1.1),
        {
            "anchor": "start",
            "weight": "truncated",
            "mask_low": 0.8,
            "mask_high": 1.3,
            "options": {"cap": 1.1},
        },
        MANY_SEQUENCES,
        (*CLIPS, "masked"),
        label="corrected",
    ),
    Case("cispo", Settings(eps=(0.2, 0.2)), {"anchor": "start", "clip_low": 0.2, "clip_high": 0.2}),
    Case("dis", Settings(eps=(0.3, 5.0)), {}, {"discrepancy": 0.8, "staleness": 0.8}, ("masked",)),
    Case(
        "dis",
        Settings(eps=(0.8, 3.0)),
        {"clip_low": 0.8, "clip_high": 3.0},
        {"discrepancy": 1.0},
        ("masked",),
        label="coding",
    ),
    Case("sat", Settings(), {}, {"discrepancy": 0.1, "staleness": 0.1}, CLIPS),
    Case(
        "sat",
        Settings(level="sequence", quantile=0.5, eps=(0.02, 0.02)),
        {"clip_low": 0.02, "clip_high": 0.02, "options": {"level": "sequence", "quantile": 0.5}},
        {"discrepancy": 0.05, "staleness": 0.05, "drift": 0.02},
        CLIPS,
        label="sequence",
    ),
    Case("dppo_tv", Settings(delta=0.15), {}, {"discrepancy": 0.4}, ("masked",)),
    Case(
        "m2po",
        Settings(eps=(0.05, 0.05)),
        {"anchor": "start", "clip_low": 0.05, "clip_high": 0.05},
        sides=CLIPS,
    ),
    Case("m2po", Settings(eps=(0.3, 0.5)), {"anchor": "start"}, {"staleness": 0.05}, label="moment_met"),
    Case("topr", Settings()),
    Case("spo", Settings(), {"anchor": "start"}),
    Case("drpo", Settings()),
]


def _label(case: Case) -> str:
    return f"{case.name}-{case.label}" if case.label else case.name


def reference_tokens(problem: Problem, anchor: str, live: Tensor) -> list[list[Token]]:
    """Action tokens by sequence, in order of first appearance."""
    batch, sequences = problem.batch, {}
    for t in range(live.numel()):
        sequence = sequences.setdefault(int(batch.sequence_ids[t]), [])
        if not batch.action_mask[t]:
            continue
        rollout = batch.rollout_logprobs[t].item()
        sequence.append(
            Token(
                live=live[t],
                rollout=rollout,
                anchor=rollout if anchor == "rollout" else batch.anchor_logprobs[t].item(),
                advantage=batch.advantages[t].item(),
                gap=int(batch.version_gap[t]),
                reward=batch.rewards[t].item(),
                reference=batch.reference_logprobs[t].item(),
            )
        )
    return list(sequences.values())


def assert_matches(case: Case, problem: Problem, aggregation: str) -> None:
    """Value and gradient of the preset equal the reference's."""
    of = objective(case.name, aggregation=aggregation, **case.config)
    output, gradient = run(of, problem)
    live = problem.logprobs.clone().requires_grad_()
    tokens = reference_tokens(problem, of.config.anchor, live)
    expected = aggregate(REFERENCES[case.name](tokens, case.settings), aggregation)
    (expected_gradient,) = torch.autograd.grad(expected, live)
    torch.testing.assert_close(output.loss, expected.detach(), rtol=RELATIVE, atol=1e-15)
    torch.testing.assert_close(gradient, expected_gradient, rtol=RELATIVE, atol=1e-15)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_sum"])
@pytest.mark.parametrize("case", CASES, ids=_label)
def test_value_and_gradient_equal_the_reference(case: Case, aggregation: str) -> None:
    for seed in (0, 1):
        assert_matches(case, random_problem(seed, **case.scales), aggregation)


@pytest.mark.parametrize("case", CASES, ids=_label)
def test_the_cases_reach_both_sides_of_every_threshold(case: Case) -> None:
    of = objective(case.name, **case.config)
    shares = metrics_of(of, run(of, random_problem(0, **case.scales))[0])
    assert all(0.0 < shares[side] < 1.0 for side in case.sides), {side: shares[side] for side in case.sides}


def test_every_preset_has_a_case() -> None:
    assert {case.name for case in CASES} == set(METHODS) == set(REFERENCES)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_identity_without_gap_or_noise_is_the_plain_policy_gradient(name: str) -> None:
    """All ratios 1 gives -Â/N at every action token, whatever the method."""
    problem = random_problem(3, discrepancy=0.0, staleness=0.0, placeholders=False)
    of = objective(name)
    _, gradient = run(of, problem)
    tokens = Normaliser.count(problem.batch).tokens
    expected = torch.where(problem.action, -problem.batch.advantages / tokens, 0.0)
    if name == "gspo":  # a sequence's ratio shares the gradient of its tokens evenly: equal per sequence
        ids = problem.batch.sequence_ids
        for sequence in ids.unique():
            rows = (ids == sequence) & problem.action
            expected[rows] = expected[rows].mean()
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("icepop", {}),
        ("decoupled", {"mask_low": 0.5, "mask_high": 5.0, "clip_low": 0.2, "clip_high": 0.2}),
        ("mis", {"mask_low": 0.2, "mask_high": 5.0}),
        ("tis", {}),
        ("dis", {}),
        ("dppo_tv", {}),
    ],
)
def test_the_gradient_weight_is_r_and_never_r_squared(name: str, config: dict[str, Any]) -> None:
    """Field bug 19: with r_s = 1 and r_d = r = 1.25, the gradient is -r Â/N (1.25), not -r² Â/N (1.5625)."""
    problem = random_problem(5, discrepancy=0.0, staleness=0.0, placeholders=False)
    rollout = problem.logprobs - math.log(1.25)
    advantages = -problem.batch.advantages.abs()  # dppo accepts what leads back towards μ
    batch = type(problem.batch)(
        rollout,
        problem.logprobs,
        advantages,
        problem.action,
        problem.batch.sequence_ids,
        problem.batch.version_gap,
    )
    _, gradient = run(objective(name, **config), Problem(problem.logprobs, batch))
    expected = torch.where(problem.action, -1.25 * advantages / int(problem.action.sum()), 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


# In the others a weight or a clip's end is a detached function of the log-probs: a finite difference would move it.
DIFFERENTIABLE = [
    case for case in CASES if case.name not in ("cispo", "dis", "dppo_tv", "topr", "sat", "m2po")
]


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=_label)
def test_gradcheck(case: Case) -> None:
    scales = {**case.scales, "lengths": (12, 1, 9)}
    problem = random_problem(7, placeholders=False, **scales)
    of = objective(case.name, kl_coefficient=0.1, kl_estimator="k3", **case.config)
    normaliser, state = Normaliser.count(problem.batch), prepared(of, problem)
    assert torch.autograd.gradcheck(
        lambda logprobs: of.loss(logprobs, problem.batch, normaliser, state=state).loss,
        problem.logprobs.clone().requires_grad_(),
        eps=1e-7,
        atol=1e-6,  # truncation error eps² and cancellation 1e-16/eps
    )
