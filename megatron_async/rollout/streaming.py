"""Tokens of an answer that is still under way, and which of them may be recorded before it is finished.

Invariants
- A token is recorded early only when its version is certain. The engine held at least `floor` when it was asked, and a
  chunk's label is no older than any token in it: a chunk labelled `floor` was sampled under `floor`. From the first
  chunk with another label on, everything waits for the finished answer, whose spans say where the weights changed.
- Early tokens are those of the finished answer: one that says otherwise is refused, and they are withdrawn. That
  catches a token with the label of older weights, which a resumed trainer published while it was sampled.
"""

from __future__ import annotations

from itertools import chain

from megatron_async.trajectory import Trajectory, VersionSpan
from sglang_bridge import Chunk, EngineError, Generation


class Streamed:
    """One answer under way. floor: the version that the engines sampled with at least when it was asked for, or None
    where that is not known; then nothing is recorded early."""

    __slots__ = ("_chunks", "_floor", "_label", "_start", "_trajectory", "taken")

    def __init__(self, trajectory: Trajectory, floor: int | None) -> None:
        self.taken = 0
        """Tokens of this answer that the trajectory already holds."""
        self._trajectory = trajectory
        self._start = len(trajectory)
        self._floor = floor
        self._label = None if floor is None else str(floor)
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        """Keep a chunk for `settle`; a label other than the floor's ends early recording for this answer."""
        if chunk.version_on_arrival == self._label:
            self._chunks.append(chunk)
        else:
            self._label = None

    def settle(self) -> None:
        """Append what has arrived, as far as its version is certain, to the trajectory."""
        if not self._chunks or self._floor is None:
            return
        ids = list(chain.from_iterable(chunk.output_ids for chunk in self._chunks))
        logprobs = list(chain.from_iterable(chunk.logprobs for chunk in self._chunks))
        self._chunks.clear()
        self._trajectory.append_action(ids, logprobs, [VersionSpan(self._floor, 0, len(ids))])
        self.taken += len(ids)

    def withdraw(self) -> int:
        """Take early tokens back from the trajectory, since the answer is no good; how many those were."""
        self._chunks.clear()
        withdrawn, self.taken = self.taken, 0
        self._trajectory.withdraw(withdrawn)
        return withdrawn

    def rest(
        self, generation: Generation, spans: list[VersionSpan]
    ) -> tuple[list[int], list[float], list[VersionSpan]]:
        """(ids, log-probs, spans) of the finished answer after the tokens that are recorded.

        Raises EngineError when the recorded ones are not the answer's beginning.
        """
        self._chunks.clear()
        if not self.taken:
            return generation.output_ids, generation.logprobs, spans
        early = self._trajectory.token_ids[self._start : self._start + self.taken].tolist()
        before = [span for span in spans if span.start < self.taken and span.version == self._floor]
        of_floor = sum(min(span.end, self.taken) - span.start for span in before)
        if generation.output_ids[: self.taken] != early or of_floor != self.taken:
            raise EngineError(
                f"the finished answer contradicts the {self.taken} tokens that were streamed before under version "
                f"{self._floor}: it begins {generation.output_ids[:8]} with spans {spans[:4]}"
            )
        later = [
            VersionSpan(span.version, max(span.start - self.taken, 0), span.end - self.taken, span.kv_version)
            for span in spans
            if span.end > self.taken
        ]
        return generation.output_ids[self.taken :], generation.logprobs[self.taken :], later
