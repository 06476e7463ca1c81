"""PPO-EWMA's anchor: the training engine with weights averaged over versions (arXiv 2605.12070).

Invariants:
- The average is over the optimiser's fp32 masters of this rank's shard, updated once per version.
- It is swapped into the model by an exchange that is its own inverse, so the weights come back bit for bit without a
  copy of them; digests are compared before and after.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any

from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.old_logits.ewma import WeightAverage
from megatron_async.old_logits.source import AnchorLogprobs, LogProbs, OldLogitSource, timed
from megatron_async.snapshots import DigestMismatchError
from megatron_async.snapshots.walker import Weights

logger = logging.getLogger(__name__)


@contextmanager
def exchanged(weights: Weights, exchange: Callable[[], None]) -> Iterator[None]:
    """Run the block with other weights. exchange: swaps them in, and called again, out.

    Raises:
        DigestMismatchError: the weights did not come back bit for bit.
    """
    before = weights.digests()
    exchange()
    try:
        yield
    finally:
        exchange()
        differing = (weights.digests() != before).nonzero()[0]
    if differing.size:
        raise DigestMismatchError(
            f"{differing.size} of {len(before)} tensors changed while averaged weights were in the model, the first is "
            f"'{weights.specs[int(differing[0])].name}'. Masters and weights no longer agree: load a checkpoint"
        )


class AveragedSource(OldLogitSource):
    """Anchor `ewma`. average: over `policy`'s masters. with_start: as for the other sources."""

    def __init__(self, policy: Policy, average: WeightAverage, with_start: bool) -> None:
        self.average = average
        self._policy = policy
        self._with_start = with_start
        self._weights = Weights(dict(policy.named_parameters()), task_words=None, threads=1)

    def score(self, sequences: list[Sequence], ids: SequenceOf[str]) -> AnchorLogprobs:
        if not sequences:
            return AnchorLogprobs("approximate", metrics=self.average.metrics())
        seconds: dict[str, float] = {"forward": 0.0}
        start: LogProbs | None = None
        if self._with_start:
            start, seconds["forward"] = timed(lambda: self._policy.logprobs(sequences))
        began = time.perf_counter()
        with exchanged(self._weights, lambda: self._policy.exchange_masters(self.average.values)):
            values, forward = timed(lambda: self._policy.logprobs(sequences))
        seconds["switch"] = time.perf_counter() - began - forward
        seconds["forward"] += forward
        metrics = {**self.average.metrics(), "old_logits/share/approximate": 1.0}
        return AnchorLogprobs("approximate", values=values, start=start, seconds=seconds, metrics=metrics)

    def updated(self, version: int, oldest_needed: int) -> None:
        self.average.update(self._policy.masters())

    def trained(self, active_fraction: float) -> None:
        """Restart the average where mask and clip left too few tokens active."""
        if self.average.observe(active_fraction, self._policy.masters()):
            logger.warning(
                "averaged weights restart from the present ones: %.1f %% of the action tokens stayed active, below "
                "%.0f %% (restart %d)",
                100 * active_fraction,
                100 * self.average.rule.threshold,
                self.average.resets,
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs (this rank's shard)."""
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)
