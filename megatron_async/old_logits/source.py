"""The interface of an old-logit source, and the two sources that need no history."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_async.config.methods import ANCHORS
from megatron_async.config.schema import RunConfig
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.errors import UserError

LogProbs = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class AnchorLogprobs:
    """Log-probs recovered for one batch; each is a float32 [L] array per sequence, token-aligned.

    values: the anchor; None where the objective derives it itself (from μ, or from the training forward, which gives
        the log-probs of the starting weights when a batch is used once).
    start: under the weights at the start of this update, where a pass computed them.
    reference: under the reference policy, where a KL penalty needs them.
    kind: "exact" (computed under the token's own version), "approximate" (a named stand-in), "behaviour" (μ).
    seconds: stage name → seconds spent on it.
    """

    kind: str
    values: LogProbs | None = None
    start: LogProbs | None = None
    reference: LogProbs | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def required_start(self) -> LogProbs:
        """`start`; ValueError where the source was not built for an objective that needs it."""
        if self.start is None:
            raise ValueError(f"the {self.kind} source scored no log-probs of the starting weights")
        return self.start


class OldLogitSource(Protocol):
    """Recovers anchor log-probs; collective over all trainer ranks."""

    def score(self, sequences: list[Sequence]) -> AnchorLogprobs: ...


class StartSource:
    """π_async: the training engine with the weights at the start of this update (formulas: `start_logprobs`).

    With `separate_pass` false the training forward supplies them: with one update per batch they are the same
    numbers, and a pass of its own would only cost time.
    """

    def __init__(self, policy: Policy, separate_pass: bool) -> None:
        self._policy = policy
        self._separate_pass = separate_pass

    def score(self, sequences: list[Sequence]) -> AnchorLogprobs:
        if not self._separate_pass or not sequences:
            return AnchorLogprobs(kind="approximate")
        start, seconds = timed(lambda: self._policy.logprobs(sequences))
        return AnchorLogprobs("approximate", values=start, start=start, seconds={"forward": seconds})


class RolloutSource:
    """No scoring of old log-probs: the objective anchors on μ, or on a mixture of μ and the current policy.

    with_start: score the starting weights all the same, for objectives with statistics of the whole batch.
    """

    def __init__(self, policy: Policy, with_start: bool) -> None:
        self._policy = policy
        self._with_start = with_start

    def score(self, sequences: list[Sequence]) -> AnchorLogprobs:
        if not self._with_start or not sequences:
            return AnchorLogprobs(kind="behaviour")
        start, seconds = timed(lambda: self._policy.logprobs(sequences))
        return AnchorLogprobs("behaviour", start=start, seconds={"forward": seconds})


def timed(work: Callable[[], LogProbs]) -> tuple[LogProbs, float]:
    """The result and the seconds it took."""
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def build_source(config: RunConfig, policy: Policy, needs: frozenset[str]) -> OldLogitSource:
    """The source named in `old_logits.source`.

    needs: what the objective needs (`Objective.needs`). Raises UserError for a source that is not built in.
    """
    statistics = "batch_statistics" in needs
    one_update = config.trainer.updates_per_batch == 1
    separate_pass = statistics or not (config.old_logits.reuse_training_forward and one_update)
    builders: dict[str, Callable[[], OldLogitSource]] = {
        "start": lambda: StartSource(policy, separate_pass),
        "rollout": lambda: RolloutSource(policy, statistics),
    }
    source = config.old_logits.source
    if source not in builders:
        known = sorted({anchor.source for anchor in ANCHORS.values()} & set(builders))
        raise UserError(f"old_logits.source={source!r} is not built in yet; choose one of {known}")
    return builders[source]()
