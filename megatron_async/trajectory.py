"""The one trajectory type: what a policy saw, did, and under which version it did it.

Invariants, checked on every append and again when a trajectory is read back:

* Token ids are only ever appended, never re-tokenised; the loss mask is recorded where tokens are born.
* All per-token arrays have one length L and are aligned to the token they speak of. There is one append
  for all of them, and it is all-or-nothing: a refused append changes nothing.
* Version spans are half-open, ordered, and tile the action tokens exactly; adjacent spans of one version are
  merged, so the way a response was cut into chunks leaves no trace. Their versions may come in any order: after a
  resume of the trainer, tokens of the resumed version follow those of a version that was lost.
* A rollout log-prob is finite and at most 0.
* Failures are not rewards: only `ok` and `truncated` may carry one.
* After `finish` nothing changes any more.

Left out on purpose: old log-probs and advantages (they belong to a training step, not to the trajectory), and
text (ids are the truth).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_async import trajectory_format
from megatron_async.trajectory_format import Header, Record
from megatron_async.trajectory_values import (
    SamplingParams,
    Status,
    TrajectoryError,
    Turn,
    VersionSpan,
    extended_routing,
    json_object,
    logprob_array,
    placed_spans,
    push_merged,
    token_array,
)

__all__ = ["SamplingParams", "Status", "Trajectory", "TrajectoryError", "Turn", "VersionSpan"]


class Trajectory:
    """Tokens, loss mask, rollout log-probs, versions and turns of one episode.

    Per-token properties are read-only arrays of length L = `len(trajectory)`:
    `token_ids` int32, `loss_mask` bool, `rollout_logprobs` float32 (NaN off-action), `versions` int32 (-1
    off-action). `task` and `info` are JSON objects; they are copied, so later changes outside have no effect.

    Example::

        t = Trajectory("t0", "g0", "p0", SamplingParams())
        t.append_context([1, 2, 3])
        t.append_action([4, 5], [-0.1, -0.2], [VersionSpan(7, 0, 2)], finish_reason="stop")
        t.finish(Status.OK, reward=1.0)
        t.versions            # [-1, -1, -1, 7, 7]
        t.spans               # (VersionSpan(version=7, start=3, end=5, kv_version=None),)
    """

    def __init__(
        self,
        trajectory_id: str,
        group_id: str,
        prompt_id: str,
        sampling: SamplingParams,
        task: dict[str, Any] | None = None,
    ) -> None:
        for name, value in (
            ("trajectory_id", trajectory_id),
            ("group_id", group_id),
            ("prompt_id", prompt_id),
        ):
            if not isinstance(value, str) or not value:
                raise TrajectoryError(f"{name} must be a non-empty string, got {value!r}")
        self.trajectory_id = trajectory_id
        self.group_id = group_id
        self.prompt_id = prompt_id
        self.sampling = sampling
        self.task = json_object(task, "task")
        self.status = Status.RUNNING
        self.reward: float | None = None
        self.info: dict[str, Any] = {}
        self._length = 0
        self._ids = np.empty(0, np.int32)
        self._logprobs = np.empty(0, np.float32)
        self._versions = np.empty(0, np.int32)
        self._spans: list[VersionSpan] = []
        self._turns: list[Turn] = []
        self._open_turn: int | None = None
        self._routed: npt.NDArray[Any] | None = None

    # ------------------------------------------------------------------ appending

    def append_context(self, ids: npt.ArrayLike) -> None:
        """Append tokens the policy did not choose (a prompt or an observation).

        Raises TrajectoryError when the trajectory is finished or a turn is still open.
        """
        self._refuse_if_finished("append_context")
        tokens = token_array(ids, "context ids")
        if self._open_turn is not None and len(tokens):
            raise TrajectoryError(
                f"{self._name}: {len(tokens)} context tokens inside the open turn [{self._open_turn}, "
                f"{self._length}); end the turn first: pass finish_reason with its last append_action"
            )
        self._append(tokens, np.full(len(tokens), np.nan, np.float32), np.full(len(tokens), -1, np.int32))

    def append_action(
        self,
        ids: npt.ArrayLike,
        logprobs: npt.ArrayLike,
        spans: Iterable[VersionSpan],
        finish_reason: str | None = None,
        routed_experts: npt.ArrayLike | None = None,
    ) -> None:
        """Append one chunk of n tokens that the policy sampled; a turn may come in any number of chunks.

        ids, logprobs: n values each. spans: relative to this chunk, tiling [0, n) exactly; none when n = 0.
        finish_reason: ends the turn. routed_experts: ids of the chosen experts, [L - 1, layers, top-k] for the
        *whole sequence* up to the end of this chunk, as the engine reports them; rows already recorded are kept
        (they are the routing that token was sampled with), only new ones are added.

        Raises TrajectoryError, leaving the trajectory unchanged, if any array disagrees.
        """
        self._refuse_if_finished("append_action")
        tokens = token_array(ids, "action ids")
        values = logprob_array(logprobs, self._name)
        if len(tokens) != len(values):
            raise TrajectoryError(f"{self._name}: {len(tokens)} action ids but {len(values)} log-probs")
        if self._length == 0:
            raise TrajectoryError(f"{self._name}: {len(tokens)} action tokens before any context token")
        if finish_reason == "":
            raise TrajectoryError(f"{self._name}: finish_reason is empty; use None while the turn goes on")
        self._check_turn_budget(len(tokens))
        placed = placed_spans(tuple(spans), len(tokens), self._length, self._name)
        routed = extended_routing(self._routed, routed_experts, self._length + len(tokens), self._name)

        versions = np.empty(len(tokens), np.int32)
        for span in placed:
            versions[span.start - self._length : span.end - self._length] = span.version
        if self._open_turn is None and (len(tokens) or finish_reason is not None):
            self._open_turn = self._length
        self._append(tokens, values, versions)
        self._routed = routed
        for span in placed:
            push_merged(self._spans, span)
        if finish_reason is not None:
            self._close_turn(finish_reason)

    def required_reward(self) -> float:
        """The reward; raises TrajectoryError where there is none, so that a failure never enters a loss as 0."""
        if self.reward is None:
            raise TrajectoryError(
                f"{self._name}: no reward (status {self.status}); it must not be trained on"
            )
        return self.reward

    def finish(self, status: Status, reward: float | None = None, info: dict[str, Any] | None = None) -> None:
        """Freeze the trajectory.

        `ok` needs a finite reward and at least one action token; `truncated` may have a reward; failures must not.
        A turn still open is closed with finish_reason "abort", except under `ok`, where it is an error.
        """
        self._refuse_if_finished("finish")
        status = Status(status)
        if status is Status.RUNNING:
            raise TrajectoryError(f"{self._name}: finish needs an end status, got {status.value!r}")
        if reward is not None and not np.isfinite(reward):
            raise TrajectoryError(f"{self._name}: reward must be finite, got {reward}")
        if status is Status.OK and (reward is None or not self._spans or self._open_turn is not None):
            raise TrajectoryError(
                f"{self._name}: status ok needs a reward (got {reward}), action tokens "
                f"(has {self.num_action_tokens}) and no open turn (open since {self._open_turn})"
            )
        if not status.trainable and reward is not None:
            raise TrajectoryError(
                f"{self._name}: status {status.value} is a failure, not a reward of {reward}"
            )
        self.info = json_object(info, "info")
        self.reward = None if reward is None else float(reward)
        if self._open_turn is not None:
            self._close_turn("abort")
        self.status = status

    def withdraw(self, count: int) -> None:
        """Forget the last `count` tokens of the turn still open: whoever sampled them has said otherwise.

        Raises TrajectoryError when the turn does not hold so many.
        """
        self._refuse_if_finished("withdraw")
        held = self._open_tokens
        if not 0 <= count <= held:
            raise TrajectoryError(f"{self._name}: {count} tokens cannot be withdrawn, the open turn holds {held}")
        start = self._length - count
        kept = [s for s in self._spans if s.start < start]
        if kept and kept[-1].end > start:
            kept[-1] = VersionSpan(kept[-1].version, kept[-1].start, start, kept[-1].kv_version)
        self._spans, self._length = kept, start
        if start == self._open_turn:
            self._open_turn = None
        if self._routed is not None:
            self._routed = self._routed[: max(start - 1, 0)]
        # Snapshots share the arrays, and what is appended next is written where these tokens were.
        self._ids, self._logprobs = self._ids[:start].copy(), self._logprobs[:start].copy()
        self._versions = self._versions[:start].copy()

    def snapshot(self) -> Trajectory:
        """The trajectory as it is now, for another thread to read while this one grows. Costs no copy of its tokens.

        Arrays are shared up to the present length, which appends never write to. Nothing may be appended to it.
        """
        taken = copy.copy(self)
        taken._spans, taken._turns = list(self._spans), list(self._turns)
        return taken

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        return trajectory_format.encode(self._record()) == trajectory_format.encode(other._record())

    __hash__ = None  # type: ignore[assignment]  # mutable until finished

    def __repr__(self) -> str:
        return (
            f"Trajectory({self.trajectory_id!r}, group={self.group_id!r}, status={self.status.value}, "
            f"tokens={self._length}, actions={self.num_action_tokens}, turns={len(self._turns)}, "
            f"versions={self.min_version}..{self.max_version}, reward={self.reward})"
        )

    @property
    def finished(self) -> bool:
        return self.status is not Status.RUNNING

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return _read_only(self._ids[: self._length])

    @property
    def rollout_logprobs(self) -> npt.NDArray[np.float32]:
        return _read_only(self._logprobs[: self._length])

    @property
    def versions(self) -> npt.NDArray[np.int32]:
        return _read_only(self._versions[: self._length])

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        return _read_only(self._versions[: self._length] >= 0)

    @property
    def kv_mismatch(self) -> npt.NDArray[np.bool_]:
        """bool[L]: tokens sampled over KV of another version; no exact log-prob exists for them."""
        mask = np.zeros(self._length, np.bool_)
        for span in self._spans:
            mask[span.start : span.end] = span.kv_version is not None
        return _read_only(mask)

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        return tuple(self._spans)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Completed turns; the one still open is `open_turn`."""
        return tuple(self._turns)

    @property
    def num_turns(self) -> int:
        """Number of completed turns."""
        return len(self._turns)

    @property
    def open_turn(self) -> int | None:
        """Start of the turn still being sampled, or None."""
        return self._open_turn

    @property
    def num_action_tokens(self) -> int:
        return sum(span.end - span.start for span in self._spans)

    @property
    def min_version(self) -> int | None:
        """Lowest version id among the action tokens; None without action tokens."""
        return min((span.version for span in self._spans), default=None)

    @property
    def max_version(self) -> int | None:
        """Highest version id among the action tokens; None without action tokens."""
        return max((span.version for span in self._spans), default=None)

    @property
    def last_version(self) -> int | None:
        """Version of the last action token; None without action tokens."""
        return self._spans[-1].version if self._spans else None

    @property
    def routed_experts(self) -> npt.NDArray[Any] | None:
        """[L - 1, layers, top-k] uint8 (expert ids < 256) or int16; row t is the routing of token t.

        None when the engine reported nothing, or not enough to reach the last action token. Rows after the last
        one reported repeat it: no action token depends on them.
        """
        if self._routed is None or not self._spans or len(self._routed) < self._spans[-1].end - 1:
            return None
        missing = self._length - 1 - len(self._routed)
        if missing > 0:
            return _read_only(np.concatenate([self._routed, np.repeat(self._routed[-1:], missing, axis=0)]))
        return _read_only(self._routed[:])

    def remaining_new_tokens(self, max_tokens: int | None = None) -> int:
        """Tokens the current turn may still sample: its own budget less what the open turn already holds.

        max_tokens: limit of the whole trajectory, context included. A resumed partial response thus gets the rest
        of its budget, not a fresh one.
        """
        left = self.sampling.max_new_tokens - self._open_tokens
        return max(0, left if max_tokens is None else min(left, max_tokens - self._length))

    # ------------------------------------------------------------------ bytes

    def to_bytes(self) -> bytes:
        """Serialise, running or finished: compact, versioned, digest-checked (see `trajectory_format`)."""
        return trajectory_format.write(self._record())

    @classmethod
    def from_bytes(cls, data: bytes) -> Trajectory:
        """Read `to_bytes` output back, through the same checks as the appends.

        Raises TrajectoryError for a foreign format, a wrong digest, or contents that break an invariant.
        """
        return _replayed(cls, trajectory_format.read(bytes(data)))

    def _record(self) -> Record:
        header = Header(
            trajectory_id=self.trajectory_id,
            group_id=self.group_id,
            prompt_id=self.prompt_id,
            sampling=astuple(self.sampling),
            task=self.task,
            status=self.status.value,
            reward=self.reward,
            info=self.info,
            tokens=self._length,
            spans=[astuple(s) for s in self._spans],
            turns=[astuple(t) for t in self._turns],
            open_turn=self._open_turn,
            routing=trajectory_format.routing_header(self._routed),
        )
        return Record(header, self.token_ids, self.rollout_logprobs[self.loss_mask], self._routed)

    # ------------------------------------------------------------------ internals

    @property
    def _name(self) -> str:
        return f"trajectory {self.trajectory_id!r} (length {self._length})"

    @property
    def _open_tokens(self) -> int:
        """How many tokens the turn still open holds."""
        return 0 if self._open_turn is None else self._length - self._open_turn

    def _refuse_if_finished(self, operation: str) -> None:
        if self.finished:
            raise TrajectoryError(f"{self._name}: {operation} after it was finished as {self.status.value}")

    def _append(
        self, ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], versions: npt.NDArray[np.int32]
    ) -> None:
        """The one append: all arrays grow together (by doubling, so that many small chunks stay cheap)."""
        end = self._length + len(ids)
        if end > len(self._ids):
            capacity = max(64, 2 * len(self._ids), end)
            self._ids = _grown(self._ids, self._length, capacity)
            self._logprobs = _grown(self._logprobs, self._length, capacity)
            self._versions = _grown(self._versions, self._length, capacity)
        self._ids[self._length : end] = ids
        self._logprobs[self._length : end] = logprobs
        self._versions[self._length : end] = versions
        self._length = end

    def _close_turn(self, finish_reason: str) -> None:
        if self._open_turn is not None:
            self._turns.append(Turn(self._open_turn, self._length, finish_reason))
        self._open_turn = None

    def _check_turn_budget(self, count: int) -> None:
        used = self._open_tokens
        if used + count > self.sampling.max_new_tokens:
            raise TrajectoryError(
                f"{self._name}: {used} + {count} tokens exceed the turn's budget of {self.sampling.max_new_tokens}; "
                "a continued turn must ask for remaining_new_tokens()"
            )


# ---------------------------------------------------------------------- helpers


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def _grown(array: npt.NDArray[Any], used: int, capacity: int) -> npt.NDArray[Any]:
    grown = np.empty(capacity, array.dtype)
    grown[:used] = array[:used]
    return grown


def _replayed(cls: type[Trajectory], record: Record) -> Trajectory:
    """Rebuild by appending turn after turn: the checks of a read are the checks of a write."""
    header, ids = record.header, record.token_ids
    damaged = f"damaged trajectory {header.trajectory_id!r}"
    sampling = SamplingParams(*header.sampling)
    trajectory = cls(header.trajectory_id, header.group_id, header.prompt_id, sampling, header.task)
    open_turns = [] if header.open_turn is None else [(header.open_turn, header.tokens, None)]
    position = used = 0
    for start, end, reason in [*header.turns, *open_turns]:
        if not position <= start <= end <= header.tokens:
            raise TrajectoryError(
                f"{damaged}: turns {header.turns} overlap or leave its {header.tokens} tokens"
            )
        spans = [
            VersionSpan(version, max(first, start) - start, min(last, end) - start, kv)
            for version, first, last, kv in header.spans
            if first < end and last > start
        ]
        trajectory.append_context(ids[position:start])
        logprobs = record.action_logprobs[used : used + end - start]
        trajectory.append_action(ids[start:end], logprobs, spans, reason)
        position, used = end, used + end - start
    trajectory.append_context(ids[position:])
    if list(header.spans) != [astuple(s) for s in trajectory.spans]:
        raise TrajectoryError(f"{damaged}: spans {header.spans} are not those of its turns")
    trajectory._routed = record.routing
    if header.status not in set(Status):
        raise TrajectoryError(f"{damaged}: unknown status {header.status!r}")
    if header.status != Status.RUNNING:
        trajectory.finish(Status(header.status), header.reward, header.info)
    return trajectory
