"""Exact old log-probs without a history: every token is scored before its version leaves the trainer.

Before each update generation stops, partial trajectories are written down, and the resident weights score every token
of their version that has no old log-prob yet, into a pool. Route 3 of arXiv 2605.12070.

Invariants:
- A token is scored under resident weights of its own version or not at all; one that was missed has no anchor (NaN),
  which the objective rejects and counts.
- The pool only grows until a trajectory is trained on or too old, and can be restored after a crash (`export`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.old_logits.pool import ScorePool
from megatron_async.old_logits.shards import version_shards
from megatron_async.old_logits.source import AnchorLogprobs, Flags, LogProbs, OldLogitSource, timed


class InterruptSource(OldLogitSource):
    """Anchor `interrupt`. with_start, reuse_training_forward, eager: as for `SnapshotSource`."""

    def __init__(
        self, policy: Policy, *, with_start: bool, reuse_training_forward: bool, eager: bool = False
    ) -> None:
        self._policy = policy
        self._with_start = with_start
        self._reuse = reuse_training_forward and not with_start
        self._eager = eager
        self._pool = ScorePool()
        self._version = 0
        self._seconds = 0.0
        self._tokens = 0

    @property
    def scores_ahead(self) -> bool:
        return self._eager

    @property
    def interrupts(self) -> bool:
        return True

    def score(self, sequences: list[Sequence], ids: SequenceOf[str]) -> AnchorLogprobs:
        if not sequences:
            return AnchorLogprobs("exact", metrics=self._costs())
        actions = [sequence.arrays["action_mask"] for sequence in sequences]
        is_current = [
            mask & (s.arrays["version_gap"] == 0) for mask, s in zip(actions, sequences, strict=True)
        ]
        values = [self._from_pool(key, len(s)) for key, s in zip(ids, sequences, strict=True)]
        seconds, start = {"forward": 0.0}, None
        if self._with_start:
            start, seconds["forward"] = timed(lambda: self._policy.logprobs(sequences))
            for value, scored, flags in zip(values, start, is_current, strict=True):
                value[flags] = scored[flags]
        elif not self._reuse:
            missing = [f & np.isnan(v) for f, v in zip(is_current, values, strict=True)]
            seconds["forward"] = self._score_resident(sequences, missing, values)
        known = [~np.isnan(v) | (f & self._reuse) for v, f in zip(values, is_current, strict=True)]
        exact = [m & k & ~s.arrays["kv_mismatch"] for m, k, s in zip(actions, known, sequences, strict=True)]
        return AnchorLogprobs(
            "exact",
            values=values,
            is_current=is_current if self._reuse else None,
            exact=exact,
            start=start,
            seconds=seconds,
            metrics={**self._costs(), **_shares(actions, known, exact)},
        )

    def score_ahead(self, sequences: list[Sequence], ids: SequenceOf[str]) -> None:
        """Score the tokens of the resident version (gap 0) that the pool does not have."""
        began = time.perf_counter()
        values = [_widened(self._pool.peek(key), len(s)) for key, s in zip(ids, sequences, strict=True)]
        resident = [s.arrays["action_mask"] & (s.arrays["version_gap"] == 0) for s in sequences]
        missing = [flags & np.isnan(value) for flags, value in zip(resident, values, strict=True)]
        self._score_resident(sequences, missing, values)
        for key, value, sequence in zip(ids, values, sequences, strict=True):
            self._pool.add(key, value, oldest_version=self._version - _largest_gap(sequence))
        self._seconds += time.perf_counter() - began
        self._tokens += sum(int(flags.sum()) for flags in missing)

    def updated(self, version: int, oldest_needed: int) -> None:
        self._version = version
        self._pool.forget_older_than(oldest_needed)

    def export(self, ids: SequenceOf[str]) -> dict[str, tuple[int, bytes]]:
        return self._pool.export(ids)

    def restore(self, version: int, entries: Mapping[str, tuple[int, bytes]]) -> None:
        self._version = version
        self._pool.restore(entries)

    def _from_pool(self, key: str, length: int) -> np.ndarray:
        return _widened(self._pool.take(key), length)

    def _score_resident(self, sequences: list[Sequence], missing: Flags, values: LogProbs) -> float:
        """Fill in the missing tokens under the present weights; returns the seconds of the forward."""
        shards = version_shards([np.zeros(len(flags), np.int64) for flags in missing], missing)
        if not shards:
            return 0.0
        (shard,) = shards
        scored, seconds = timed(lambda: self._policy.logprobs(shard.cut(sequences)))
        for i, positions, logprobs in zip(shard.members, shard.tokens, scored, strict=True):
            values[i][positions] = logprobs[positions]
        return seconds

    def _costs(self) -> dict[str, float]:
        seconds, tokens, self._seconds, self._tokens = self._seconds, self._tokens, 0.0, 0
        return {
            "old_logits/ahead/seconds": seconds,
            "old_logits/ahead/tokens": float(tokens),
            "old_logits/ahead/pool": float(len(self._pool)),
        }


def _widened(scored: np.ndarray | None, length: int) -> np.ndarray:
    """A copy of what is known, NaN for the tokens that came later."""
    values = np.full(length, np.nan, np.float32)
    if scored is not None:
        values[: len(scored)] = scored
    return values


def _largest_gap(sequence: Sequence) -> int:
    return int(sequence.arrays["version_gap"][sequence.arrays["action_mask"]].max(initial=0))


def _shares(actions: Flags, known: Flags, exact: Flags) -> dict[str, float]:
    """Shares of the action tokens by what their anchor is."""
    total = max(1, sum(int(mask.sum()) for mask in actions))
    clean = sum(int(flags.sum()) for flags in exact) / total
    scored = sum(int((m & k).sum()) for m, k in zip(actions, known, strict=True)) / total
    return {
        "old_logits/share/exact": clean,
        "old_logits/share/flagged": scored - clean,
        "old_logits/share/approximate": 0.0,
        "old_logits/share/absent": 1.0 - scored,
    }
