"""Exact old log-probs by time travel: every token is scored under the weights of the version that sampled it.

Invariants:
- Versions are visited newest first, one step of the history each; a sequence is forwarded only under versions it
  holds, and only up to the last token of that version.
- The weights come back bit for bit, digests compared, also when scoring fails.
- A version that cannot be restored raises before anything is forwarded; no other weights stand in for it.
- A token that was sampled over another version's KV cache is scored, but never called exact.
- What was scored ahead, while the trainer waited, is what would be scored at batch time: same versions, same cuts.
Route 1 of arXiv 2605.12070.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.old_logits.pool import ScorePool
from megatron_async.old_logits.shards import VersionShard, token_versions, version_shards
from megatron_async.old_logits.source import AnchorLogprobs, Flags, LogProbs, OldLogitSource, timed
from megatron_async.snapshots import CaptureReport, SnapshotStore, WeightHistory


@dataclass(slots=True)
class _Stage:
    """What scoring one batch cost."""

    seconds: dict[str, float] = field(default_factory=lambda: {"travel": 0.0, "forward": 0.0, "restore": 0.0})
    steps: int = 0
    forward_tokens: int = 0
    whole_tokens: int = 0
    """What would have been forwarded without cutting sequences at a version's last token."""


@dataclass(slots=True)
class _Ahead:
    """What was scored ahead since the last batch."""

    seconds: float = 0.0
    tokens: int = 0


class SnapshotSource(OldLogitSource):
    """Anchor `snapshot`, over any history of this rank's weights (differences, or full copies).

    history: holds the present weights as its live version. with_start: also score the starting weights, for
    objectives with statistics of the whole batch. reuse_training_forward: tokens of the live version take the values of
    the training forward, which are the same numbers while a batch is used for one update. background: capture while the
    loop goes on to publish. eager: score finished trajectories while the trainer waits for its batch.
    """

    def __init__(
        self,
        policy: Policy,
        history: WeightHistory,
        *,
        with_start: bool,
        reuse_training_forward: bool,
        background: bool = True,
        eager: bool = False,
    ) -> None:
        self.history = history
        self._policy = policy
        self._with_start = with_start
        self._reuse = reuse_training_forward and not with_start
        self._background = background
        self._captured: CaptureReport | None = None
        self._capture_wait = 0.0
        self._eager = eager
        self._pool = ScorePool()
        self._ahead = _Ahead()

    @property
    def scores_ahead(self) -> bool:
        return self._eager

    @property
    def captured(self) -> CaptureReport | None:
        """The newest capture that is complete."""
        return self._captured

    def score(self, sequences: list[Sequence], ids: SequenceOf[str]) -> AnchorLogprobs:
        """See `OldLogitSource.score`.

        Raises:
            UnknownVersionError, DamagedRecordError, DigestMismatchError: a version cannot be restored; the weights
                are those of the live version.
        """
        self.settle()
        if not sequences:
            return AnchorLogprobs("exact", metrics=self._storage())
        stage = _Stage()
        live = self.history.live_version
        start = self._score_start(sequences, stage) if self._with_start else None
        versions = [token_versions(sequence, live) for sequence in sequences]
        actions = [sequence.arrays["action_mask"] for sequence in sequences]
        is_current = [mask & (held == live) for mask, held in zip(actions, versions, strict=True)]
        values = [np.full(len(sequence), np.nan, np.float32) for sequence in sequences]
        known = [flags & (self._reuse or start is not None) for flags in is_current]
        if start is not None:
            for value, scored, flags in zip(values, start, known, strict=True):
                value[flags] = scored[flags]
        wanted = [mask & ~done for mask, done in zip(actions, known, strict=True)]
        ahead = self._take_pooled(ids, wanted, values)
        missing = [mask & ~done for mask, done in zip(wanted, ahead, strict=True)]
        self._visit(sequences, version_shards(versions, missing), values, stage)
        exact = [mask & ~s.arrays["kv_mismatch"] for mask, s in zip(actions, sequences, strict=True)]
        return AnchorLogprobs(
            "exact",
            values=values,
            is_current=is_current if self._reuse else None,
            exact=exact,
            start=start,
            seconds={**stage.seconds, **self._capture_seconds()},
            metrics={
                **self._sharding(versions, actions, stage),
                **_shares(actions, exact),
                **self._ahead_metrics(actions, wanted, ahead),
                **self._storage(),
            },
        )

    def score_ahead(self, sequences: list[Sequence], ids: SequenceOf[str]) -> None:
        """See `OldLogitSource.score_ahead`; raises as `score` does."""
        self.settle()  # the live version is the new one only once it is captured
        began, stage, live = time.perf_counter(), _Stage(), self.history.live_version
        versions = [token_versions(sequence, live) for sequence in sequences]
        actions = [sequence.arrays["action_mask"] for sequence in sequences]
        values = [np.full(len(sequence), np.nan, np.float32) for sequence in sequences]
        self._visit(sequences, version_shards(versions, actions), values, stage)
        for key, scored, held, mask in zip(ids, values, versions, actions, strict=True):
            self._pool.add(key, scored, int(held[mask].min(initial=live)))
        self._ahead.seconds += time.perf_counter() - began
        self._ahead.tokens += sum(int(mask.sum()) for mask in actions)

    def hand_over(self, ids: SequenceOf[str]) -> dict[str, tuple[int, bytes]]:
        """What was scored ahead of these trajectories, which is then forgotten here; equal on all ranks."""
        scores = self._pool.export(ids)
        for key in ids:
            self._pool.take(key)
        return scores

    def updated(self, version: int, oldest_needed: int) -> None:
        """Record the step to the weights that the policy holds now.

        Raises:
            BudgetExceededError: the budgets of `snapshots` cannot hold every needed version (with a capture in the
                background, raised by the next `settle`).
        """
        self.settle()
        self._pool.forget_older_than(oldest_needed)
        history = self.history
        history.set_needed([known for known in history.versions() if known >= oldest_needed])
        if self._background and isinstance(history, SnapshotStore):
            history.capture_in_background(version)
            self._captured = None
        else:
            self._captured = history.capture(version)

    def settle(self) -> None:
        """Wait for a capture in the background, and raise its error; before the weights are written or travel."""
        if isinstance(self.history, SnapshotStore):
            began = time.perf_counter()
            report = self.history.settle()
            if report is not None:
                self._captured, self._capture_wait = report, time.perf_counter() - began

    def close(self) -> None:
        self.history.close()

    # ---- scoring -------------------------------------------------------------------------------------------------

    def _take_pooled(self, ids: SequenceOf[str], wanted: Flags, values: LogProbs) -> Flags:
        """Fill in what was scored ahead; returns which tokens."""
        filled = []
        for key, mask, value in zip(ids, wanted, values, strict=True):
            scored = self._pool.take(key)
            found = np.zeros_like(mask) if scored is None else mask & ~np.isnan(scored)
            if scored is not None:
                value[found] = scored[found]
            filled.append(found)
        return filled

    def _score_start(self, sequences: list[Sequence], stage: _Stage) -> LogProbs:
        start, stage.seconds["forward"] = timed(lambda: self._policy.logprobs(sequences))
        stage.forward_tokens += sum(map(len, sequences))
        stage.whole_tokens += sum(map(len, sequences))
        return start

    def _visit(
        self, sequences: list[Sequence], shards: list[VersionShard], values: LogProbs, stage: _Stage
    ) -> None:
        """Fill `values` shard by shard; the live version needs no journey, and is scored before it begins."""
        live = self.history.live_version
        for shard in shards:
            self.history.check(shard.version)
        for shard in (shard for shard in shards if shard.version == live):
            self._score_shard(sequences, shard, values, stage)
        away = [shard for shard in shards if shard.version != live]
        if not away:
            return
        with self.history.journey() as journey:
            for shard in away:
                journey.go(shard.version)
                self._score_shard(sequences, shard, values, stage)
        stage.steps = journey.report.steps
        stage.seconds["travel"] += journey.report.seconds
        stage.seconds["restore"] += journey.report.return_seconds

    def _score_shard(
        self, sequences: list[Sequence], shard: VersionShard, values: LogProbs, stage: _Stage
    ) -> None:
        scored, seconds = timed(lambda: self._policy.logprobs(shard.cut(sequences)))
        for i, positions, logprobs in zip(shard.members, shard.tokens, scored, strict=True):
            values[i][positions] = logprobs[positions]
        stage.seconds["forward"] += seconds
        stage.forward_tokens += shard.forward_tokens
        stage.whole_tokens += sum(len(sequences[i]) for i in shard.members)

    # ---- reporting -----------------------------------------------------------------------------------------------

    def _sharding(self, versions: list[np.ndarray], actions: Flags, stage: _Stage) -> dict[str, float]:
        """Shards are counted with those of the live version, whether or not they needed a pass of their own."""
        shards = version_shards(versions, actions)
        pairs = sum(len(shard.members) for shard in shards)
        return {
            "old_logits/versions": float(len(shards)),
            "old_logits/shards_per_trajectory": pairs / len(versions),
            "old_logits/forward_tokens": float(stage.forward_tokens),
            "old_logits/cut_share": 1.0 - stage.forward_tokens / max(1, stage.whole_tokens),
            "old_logits/steps": float(stage.steps),
        }

    def _ahead_metrics(self, actions: Flags, wanted: Flags, ahead: Flags) -> dict[str, float]:
        """Shares scored ahead: of the action tokens, and of those that the stage needed log-probs for."""
        if not self._eager:
            return {}
        done, self._ahead = self._ahead, _Ahead()
        served = sum(int(flags.sum()) for flags in ahead)
        return {
            "old_logits/ahead/share": served / max(1, sum(int(mask.sum()) for mask in actions)),
            "old_logits/ahead/share_of_needed": served / max(1, sum(int(mask.sum()) for mask in wanted)),
            "old_logits/ahead/seconds": done.seconds,
            "old_logits/ahead/tokens": float(done.tokens),
            "old_logits/ahead/pool": float(len(self._pool)),
        }

    def _capture_seconds(self) -> dict[str, float]:
        if self._captured is None:
            return {}
        wait, self._capture_wait = self._capture_wait, 0.0
        report = self._captured
        return {"capture": report.seconds + report.durable_seconds, "capture_wait": wait}

    def _storage(self) -> dict[str, float]:
        """Bytes by tier on this rank, and the size of the newest record."""
        row = {f"snapshots/bytes/{tier}": float(used) for tier, used in self.history.usage().items()}
        row["snapshots/versions"] = float(len(self.history.versions()))
        if self._captured is not None:
            row["snapshots/record_bytes"] = float(self._captured.nbytes)
            row["snapshots/changed"] = self._captured.changed
        return row


def _shares(actions: Flags, exact: Flags) -> dict[str, float]:
    """Shares of the action tokens by what their anchor is; flagged ones were sampled over another version's KV."""
    total = max(1, sum(int(mask.sum()) for mask in actions))
    clean = sum(int(flags.sum()) for flags in exact) / total
    return {
        "old_logits/share/exact": clean,
        "old_logits/share/flagged": 1.0 - clean,
        "old_logits/share/approximate": 0.0,
    }
