"""Exact old log-probs from a second model on ranks of its own, which scores while the actor trains.

The actor's rank records each version and sends the difference to the scorer rank that holds the same part of the model;
the scorer (`megatron_async/scorer.py`) scores finished trajectories into the bank. At batch time the actor only reads.
Route 2 of arXiv 2605.12070.

Invariants:
- Every value was computed under its token's own version; what the scorer has not scored is waited for, up to a
  deadline, and never replaced.
- Versions are sent in the order they were made; a send that failed is raised at the next version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.old_logits.source import AnchorLogprobs, LogProbs, OldLogitSource, timed
from megatron_async.peers import END, PeerLink
from megatron_async.snapshots import CaptureReport, SnapshotStore
from megatron_async.snapshots.transfer import read_step

Fetch = Callable[[SequenceOf[str]], Mapping[str, np.ndarray]]
"""Old log-probs float32 [L] of trajectories by id, waited for; equal on every rank (collective)."""


class DedicatedSource(OldLogitSource):
    """Anchor `dedicated`.

    history: durable, in `folder`; holds the present weights. link: to this rank's scorer. fetch: reads scores.
    with_start, reuse_training_forward: as for `SnapshotSource`.
    """

    def __init__(
        self,
        policy: Policy,
        history: SnapshotStore,
        folder: Path,
        link: PeerLink,
        fetch: Fetch,
        *,
        with_start: bool,
        reuse_training_forward: bool,
    ) -> None:
        self._policy = policy
        self._history = history
        self._folder = folder
        self._link = link
        self._fetch = fetch
        self._with_start = with_start
        self._reuse = reuse_training_forward and not with_start
        self._sender = ThreadPoolExecutor(1, "scorer-link")
        self._sending: Future[None] | None = None
        self._captured: CaptureReport | None = None
        self._sent_bytes = 0

    def score(self, sequences: list[Sequence], ids: SequenceOf[str]) -> AnchorLogprobs:
        """See `OldLogitSource.score`. Raises what `fetch` raises when the scorer is late."""
        if not sequences:
            return AnchorLogprobs("exact", metrics=self._storage())
        actions = [sequence.arrays["action_mask"] for sequence in sequences]
        is_current = [
            mask & (s.arrays["version_gap"] == 0) for mask, s in zip(actions, sequences, strict=True)
        ]
        values = [np.full(len(sequence), np.nan, np.float32) for sequence in sequences]
        left = [flags & self._reuse for flags in is_current]
        seconds, start = {"forward": 0.0}, None
        if self._with_start:
            start, seconds["forward"] = timed(lambda: self._policy.logprobs(sequences))
            left = is_current
            for value, scored, flags in zip(values, start, is_current, strict=True):
                value[flags] = scored[flags]
        wanted = [mask & ~flags for mask, flags in zip(actions, left, strict=True)]
        seconds["wait"] = self._fill(ids, wanted, values)
        exact = [mask & ~s.arrays["kv_mismatch"] for mask, s in zip(actions, sequences, strict=True)]
        flagged = 1.0 - sum(f.sum() for f in exact) / max(1, sum(m.sum() for m in actions))
        shares = {"old_logits/share/exact": float(1.0 - flagged), "old_logits/share/flagged": float(flagged)}
        return AnchorLogprobs(
            "exact",
            values=values,
            is_current=is_current if self._reuse else None,
            exact=exact,
            start=start,
            seconds=seconds | self._capture_seconds(),
            metrics={**shares, "old_logits/share/approximate": 0.0, **self._storage()},
        )

    def _fill(self, ids: SequenceOf[str], wanted: list[np.ndarray], values: LogProbs) -> float:
        """Values of the wanted tokens from the scorer; returns the seconds waited."""
        asked = [key for key, flags in zip(ids, wanted, strict=True) if flags.any()]
        found: dict[str, np.ndarray] = {}

        def fetch() -> LogProbs:
            found.update(self._fetch(asked))
            return []

        _, seconds = timed(fetch)
        for key, flags, value in zip(ids, wanted, values, strict=True):
            if flags.any():
                value[flags] = found[key][flags]
        return seconds

    def updated(self, version: int, oldest_needed: int) -> None:
        """Record the step, and send it to the scorer while the loop goes on.

        Raises PeerGone.
        """
        if self._sending is not None:
            self._sending.result()
        history, parent = self._history, self._history.live_version
        history.set_needed([])  # old versions live with the scorer
        self._captured = history.capture(version)
        data = read_step(history, self._folder, version, parent).to_bytes()
        self._sent_bytes = len(data)
        self._sending = self._sender.submit(self._link.send, data)

    def close(self) -> None:
        self._sender.submit(self._link.send, END)
        self._sender.shutdown(wait=True)
        self._history.close()

    def _capture_seconds(self) -> dict[str, float]:
        report = self._captured
        return {} if report is None else {"capture": report.seconds + report.durable_seconds}

    def _storage(self) -> dict[str, float]:
        row = {f"snapshots/bytes/{tier}": float(used) for tier, used in self._history.usage().items()}
        return row | {"old_logits/sent_bytes": float(self._sent_bytes)}
