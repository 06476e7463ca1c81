"""The interface of an old-logit source, and the two sources that need no history."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence

LogProbs = list[NDArray[np.float32]]
Flags = list[NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class AnchorLogprobs:
    """Log-probs recovered for one batch; one array [L] per sequence, token-aligned.

    values: the anchor, float32; None where the objective derives it itself (from μ, or from the training forward, which
        gives the log-probs of the starting weights when a batch is used once). NaN where it has no value.
    is_current: bool, tokens whose anchor is the training forward's own value; None when there is no such token.
    exact: bool, tokens whose anchor was computed under their own version and whose sampling used that version alone;
        None leaves it to what the anchor is.
    start: float32, under the weights at the start of this update, where a pass computed them.
    reference: float32, under the reference policy, where a KL penalty needs them.
    kind: "exact" (computed under the token's own version), "approximate" (a named stand-in), "behaviour" (μ).
    seconds: stage name → seconds spent on it. metrics: further numbers of the step, by metric name.
    """

    kind: str
    values: LogProbs | None = None
    is_current: Flags | None = None
    exact: Flags | None = None
    start: LogProbs | None = None
    reference: LogProbs | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def required_start(self) -> LogProbs:
        """`start`; ValueError where the source was not built for an objective that needs it."""
        if self.start is None:
            raise ValueError(f"the {self.kind} source scored no log-probs of the starting weights")
        return self.start


class OldLogitSource(Protocol):
    """Recovers anchor log-probs. Every method is collective over all trainer ranks, except `close`."""

    @property
    def scores_ahead(self) -> bool:
        """Whether `score_ahead` is of use while the trainer waits for its batch."""
        return False

    def score(self, sequences: list[Sequence], ids: SequenceOf[str]) -> AnchorLogprobs:
        """Anchor of every action token of the batch, before its update. The weights are as before afterwards.

        ids: the sequences' trajectories, by which what was scored ahead is found.
        """
        ...

    def score_ahead(self, sequences: list[Sequence], ids: SequenceOf[str]) -> None:
        """Score trajectories before the batch that they will be in is built."""
        return

    @property
    def interrupts(self) -> bool:
        """Whether `score_ahead` must see every token of the resident version before that version goes."""
        return False

    def export(self, ids: SequenceOf[str]) -> dict[str, tuple[int, bytes]]:
        """What was scored ahead of these trajectories and could not be scored again, to be kept; equal on all ranks."""
        return {}

    def restore(self, version: int, entries: Mapping[str, tuple[int, bytes]]) -> None:
        """Take in what `export` gave before a restart. version: of the present weights."""
        return

    def updated(self, version: int, oldest_needed: int) -> None:
        """The policy's weights are now `version`; called once per version, before it is published.

        oldest_needed: no token of an older version will be scored any more.
        """
        return

    def trained(self, active_fraction: float) -> None:
        """Share of the step's action tokens that mask and clip left active (ρ); called after `updated`."""
        return

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this source: JSON, and under "values" fp32 weights laid out like the masters."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        return

    def close(self) -> None:
        """Let go of files and threads; idempotent."""
        return


class StartSource(OldLogitSource):
    """π_async: the training engine with the weights at the start of this update.

    With `separate_pass` false the training forward supplies them: with one update per batch they are the same
    numbers, and a pass of its own would only cost time.
    """

    def __init__(self, policy: Policy, separate_pass: bool) -> None:
        self._policy = policy
        self._separate_pass = separate_pass

    def score(self, sequences: list[Sequence], ids: SequenceOf[str]) -> AnchorLogprobs:
        if not self._separate_pass or not sequences:
            return AnchorLogprobs(kind="approximate")
        start, seconds = timed(lambda: self._policy.logprobs(sequences))
        return AnchorLogprobs("approximate", values=start, start=start, seconds={"forward": seconds})


class RolloutSource(OldLogitSource):
    """No scoring of old log-probs: the objective anchors on μ, or on a mixture of μ and the current policy.

    with_start: score the starting weights all the same, for objectives with statistics of the whole batch.
    """

    def __init__(self, policy: Policy, with_start: bool) -> None:
        self._policy = policy
        self._with_start = with_start

    def score(self, sequences: list[Sequence], ids: SequenceOf[str]) -> AnchorLogprobs:
        if not self._with_start or not sequences:
            return AnchorLogprobs(kind="behaviour")
        start, seconds = timed(lambda: self._policy.logprobs(sequences))
        return AnchorLogprobs("behaviour", start=start, seconds={"forward": seconds})


def timed(work: Callable[[], LogProbs]) -> tuple[LogProbs, float]:
    """The result and the seconds it took."""
    started = time.perf_counter()
    return work(), time.perf_counter() - started
