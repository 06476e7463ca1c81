"""One batch through the training loop's own functions: what makes no step, what is said of it, what still follows."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.bank.lineage import Lineage
from megatron_async.config.schema import ObjectiveConfig
from megatron_async.engine.policy import TrainStepResult
from megatron_async.engine.sequences import Sequence
from megatron_async.objectives import Normaliser, build_objective
from megatron_async.old_logits import AnchorLogprobs
from megatron_async.train import Loop
from megatron_async.training.batch import Batch, to_sequences
from megatron_async.training.loss import token_batch, train_in_parts
from megatron_async.training.metrics import active_fraction, update_metrics
from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan

LENGTH = 6


def make_sequences(shift: float) -> tuple[list[Sequence], AnchorLogprobs]:
    """Two sequences whose anchor differs from μ by `shift` at every action token."""
    rollout = np.full(LENGTH, -1.0, np.float32)
    arrays = {
        "action_mask": np.arange(LENGTH) >= 2,
        "rollout_logprobs": rollout,
        "advantages": np.ones(LENGTH, np.float32),
        "rewards": np.ones(LENGTH, np.float32),
        "update_gap": np.ones(LENGTH, np.int64),
    }
    sequences = [Sequence(np.arange(LENGTH, dtype=np.int32), arrays=arrays) for _ in range(2)]
    values = [rollout + np.float32(shift)] * 2
    return sequences, AnchorLogprobs("exact", values=values, start=values)


class NoPolicy:
    """A policy that must not be asked for a step."""

    layout = SimpleNamespace(context_parallel_size=1)

    def train_step(self, sequences: Any, loss: Any) -> TrainStepResult:
        raise AssertionError("a batch that the objective rejects as a whole reached the optimiser")


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_of_which_the_mask_takes_every_token_makes_no_step_and_says_so(parts: int) -> None:
    """Field bug 14, where rejected tokens do not count: there is no denominator at all."""
    of = build_objective(
        ObjectiveConfig(
            name="decoupled", anchor="snapshot", rejected_in_denominator=False, kl_coefficient=0.0
        )
    )
    sequences, anchors = make_sequences(shift=0.5)
    results = train_in_parts(NoPolicy(), of, sequences, anchors, parts)  # type: ignore[arg-type]
    assert len(results) == parts
    assert all("accepts none of the batch's" in str(result.skipped) for result in results)
    row = update_metrics(of, results, action_tokens=8)
    assert "no optimiser step is made" in row["skipped"]
    assert (row["objective/masked"], row["objective/tokens"], row["objective/active"]) == (1.0, 8.0, 0.0)
    assert (row["loss"], row["grad_norm"]) == (0.0, 0.0)
    assert active_fraction(of, results) == 0.0


def test_a_batch_without_an_action_token_has_a_row_of_metrics_too() -> None:
    of = build_objective(ObjectiveConfig(name="ppo"))
    result = TrainStepResult(
        0.0, 0.0, 0.0, {}, (), {}, "none of the batch's 12 tokens is an action token", 1, 0.5
    )
    row = update_metrics(of, [result], action_tokens=0)
    assert row["skipped"].startswith("none of the batch's 12 tokens")
    assert row["entropy"] == 0.0
    assert active_fraction(of, [result]) is None


class Recorder:
    """Stands for the parts around the loop: every method does nothing, those named are remembered."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if name in self._answers:
            return self._answers[name]

        def record(*arguments: Any) -> None:
            self.calls.append((name, arguments))

        return record


def make_trajectory(version: int = 0) -> Trajectory:
    trajectory = Trajectory("t", "g", "p", SamplingParams(), {})
    trajectory.append_context([1, 2])
    trajectory.append_action([3, 4], [-1.0, -1.0], [VersionSpan(version, 0, 2)], "stop")
    trajectory.finish(Status.OK, 1.0, {})
    return trajectory


def test_a_step_that_the_mask_took_whole_still_tells_the_average_to_restart() -> None:
    """ρ = 0 must reach PPO-EWMA, else an average that has fallen behind would stop learning for ever."""
    of = build_objective(ObjectiveConfig(name="decoupled", anchor="ewma", rejected_in_denominator=False))
    sequences, anchors = make_sequences(shift=0.5)
    results = train_in_parts(NoPolicy(), of, sequences, anchors, parts=1)  # type: ignore[arg-type]
    loop = object.__new__(Loop)
    loop.update = lambda *_: results  # type: ignore[method-assign]
    source = Recorder(score=lambda *_: anchors, interrupts=False, scores_ahead=False)
    loop.objective, loop.old_logits = of, source  # type: ignore[assignment]
    loop.credit = SimpleNamespace(  # type: ignore[assignment]
        scalars=lambda trajectories: ([1.0], [0]), assign=lambda *_: sequences, holds_policy=lambda _: False,
        learn=lambda _: None, take_metrics=dict,
    )  # fmt: skip
    session = Recorder(
        version=0, least_updates=0, lineage=Lineage(), catching_up=False,
        stage=lambda *_: nullcontext(), feed=SimpleNamespace(take=lambda *_: [make_trajectory()]),
        interruption=SimpleNamespace(release=lambda: None),
    )  # fmt: skip
    loop.session = session  # type: ignore[assignment]
    loop.step(0)
    assert source.calls == [("trained", (0.0,))]
    assert [name for name, _ in session.calls] == ["finish_step"]  # no version was made, nothing published


def test_tokens_know_how_old_the_weights_are_that_sampled_them() -> None:
    made_at = {0: 1000.0, 1: 1010.0}
    line = Lineage([(0, None), (1, 0)], made_at)
    line.add(2, 1, made_at=1025.0)
    ages = line.seconds(1030.0, np.array([-1, 0, 1, 2]))
    assert ages is not None and ages.tolist() == [0.0, 30.0, 20.0, 5.0]
    assert Lineage([(0, None), (1, 0)]).seconds(1030.0, np.array([0])) is None


def test_sequences_carry_the_age_of_each_action_token() -> None:
    def arrays(lineage: Lineage) -> dict[str, Any]:
        return dict(to_sequences(Batch([make_trajectory()], [1.0], [0], 0, lineage))[0].arrays)

    age = arrays(Lineage([(0, None)], {0: 0.0}))["age_seconds"]
    assert age.dtype == np.float32 and age[:2].tolist() == [0.0, 0.0] and (age[2:] > 1e9).all()  # since 1970
    assert "age_seconds" not in arrays(Lineage())


def test_the_loss_measures_ages_where_there_are_any() -> None:
    sequences, anchors = make_sequences(shift=0.0)
    values = anchors.values or []
    packed = {name: torch.from_numpy(array) for name, array in sequences[0].arrays.items()}
    packed |= {"anchor_logprobs": torch.from_numpy(values[0]), "age_seconds": torch.full((LENGTH,), 8.0)}
    logprobs = torch.from_numpy(values[0])
    batch = token_batch(packed, torch.zeros(LENGTH, dtype=torch.int64), logprobs)
    of = build_objective(ObjectiveConfig(name="ppo"))
    output = of.loss(logprobs.requires_grad_(), batch, Normaliser(4, 1))
    assert of.summarise(output.stats)["objective/staleness/seconds_mean"] == pytest.approx(8.0)
