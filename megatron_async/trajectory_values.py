"""The values a trajectory is made of, each checked where it is made, and the checks on what is appended.

`name` is the trajectory's, for messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

# A float32 log-softmax of a near-certain token can round to a hair above 0; anything larger is not a log-prob.
LOGPROB_ROUNDING = 1e-5
_INT32_MAX = 2**31 - 1
_INT64 = 2**63
_INT16_MAX = 2**15 - 1


class TrajectoryError(ValueError):
    """An append, a finish or a read that would break a trajectory's invariants; the message has the values."""


class Status(StrEnum):
    """How a trajectory ended. Failures are statuses and never rewards."""

    RUNNING = "running"
    OK = "ok"
    TRUNCATED = "truncated"
    ENVIRONMENT_ERROR = "environment_error"
    ENGINE_ERROR = "engine_error"
    ABORTED = "aborted"

    @property
    def trainable(self) -> bool:
        """True for the statuses whose tokens may enter a loss."""
        return self in (Status.OK, Status.TRUNCATED)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the engine sampled; the trainer needs it to compute the same distribution.

    `max_new_tokens` is the budget of one turn. `top_k` = -1 switches top-k off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise TrajectoryError(f"temperature must be finite and >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise TrajectoryError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise TrajectoryError(f"top_k must be -1 (off) or >= 1, got {self.top_k}")
        if self.max_new_tokens < 1:
            raise TrajectoryError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) were sampled with the weights of `version`.

    `kv_version` names the older version whose weights left a part of the KV cache those tokens attended to;
    None means that the cache was computed under `version` itself, so that exact log-probs exist.
    """

    version: int
    start: int
    end: int
    kv_version: int | None = None

    def __post_init__(self) -> None:
        if self.version < 0:
            raise TrajectoryError(f"a version is >= 0: {self}")
        if not 0 <= self.start < self.end:
            raise TrajectoryError(f"a span is half-open and holds at least one token: {self}")
        if self.kv_version is not None and not 0 <= self.kv_version <= self.version:
            raise TrajectoryError(f"KV cannot come from a version newer than the weights: {self}")
        if self.kv_version == self.version:
            object.__setattr__(self, "kv_version", None)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy: action tokens [start, end), empty when the engine returned none."""

    start: int
    end: int
    finish_reason: str


def token_array(ids: npt.ArrayLike, what: str) -> npt.NDArray[np.int32]:
    array = np.asarray(ids)
    if array.ndim == 1 and array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TrajectoryError(
            f"{what} must be a flat list of integers; got {array.dtype} {list(array.shape)}"
        )
    if array.min() < 0 or array.max() > _INT32_MAX:
        raise TrajectoryError(f"{what} must be in [0, {_INT32_MAX}]; got {array.min()}..{array.max()}")
    return array.astype(np.int32)


def logprob_array(logprobs: npt.ArrayLike, name: str) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a value too large for float32 becomes -inf and is refused below
        array = np.asarray(logprobs, np.float32)
    if array.ndim != 1:
        raise TrajectoryError(f"{name}: log-probs must be a flat list; got shape {list(array.shape)}")
    bad = np.flatnonzero(~(np.isfinite(array) & (array <= LOGPROB_ROUNDING)))
    if len(bad):
        shown = ", ".join(f"[{i}]={array[i]}" for i in bad[:8])
        raise TrajectoryError(
            f"{name}: {len(bad)} of {len(array)} log-probs are not finite and <= 0: {shown}"
        )
    return np.minimum(array, np.float32(0.0))


def _int64(digits: str) -> int:
    value = int(digits)
    if not -_INT64 <= value < 2 * _INT64:
        raise ValueError(f"{digits[:40]} does not fit into 64 bits")
    return value


def json_object(value: dict[str, Any] | None, what: str) -> dict[str, Any]:
    """A deep copy by way of JSON, so that what is kept is what can be written.

    Lone surrogates, which JSON can spell and UTF-8 cannot, become question marks. Raises TrajectoryError for what is no
    JSON, or holds an integer of more than 64 bits, or is nested without end.
    """
    try:
        text = json.dumps(value if value is not None else {}, allow_nan=False, ensure_ascii=False)
        copy = json.loads(text.encode("utf-8", "replace"), parse_int=_int64)
    except (TypeError, ValueError, RecursionError) as error:
        raise TrajectoryError(f"{what} must be a JSON object: {error}") from error
    if not isinstance(copy, dict):
        raise TrajectoryError(f"{what} must be a JSON object, got {type(value).__name__}")
    return copy


def placed_spans(spans: Sequence[VersionSpan], count: int, at: int, name: str) -> list[VersionSpan]:
    """Spans of a chunk of `count` tokens, moved to where it is appended; raises unless they tile [0, count)."""
    position = 0
    for span in spans:
        if span.start != position:
            raise TrajectoryError(f"{name}: spans must tile [0, {count}); got {_shown(spans)}")
        position = span.end
    if position != count:
        raise TrajectoryError(f"{name}: spans cover {position} of the chunk's {count} tokens; got {_shown(spans)}")
    return [VersionSpan(s.version, s.start + at, s.end + at, s.kv_version) for s in spans]


def push_merged(spans: list[VersionSpan], span: VersionSpan) -> None:
    """Append a span, or lengthen the last one where it says the same."""
    last = spans[-1] if spans else None
    if last and (last.end, last.version, last.kv_version) == (span.start, span.version, span.kv_version):
        spans[-1] = VersionSpan(span.version, last.start, span.end, span.kv_version)
    else:
        spans.append(span)


def _shown(spans: Sequence[VersionSpan]) -> str:
    return "[" + ", ".join(f"[{s.start},{s.end})->{s.version}" for s in spans[:16]) + "]"


def extended_routing(
    known: npt.NDArray[Any] | None, routed: npt.ArrayLike | None, length: int, name: str
) -> npt.NDArray[Any] | None:
    """The rows known so far plus the new ones of a whole-sequence array of `length` - 1 rows."""
    if routed is None:
        return known
    array = np.asarray(routed)
    if array.ndim != 3 or array.dtype.kind not in "iu" or len(array) != length - 1:
        raise TrajectoryError(
            f"{name}: routed experts must be integers [{length - 1}, layers, top-k] for the whole sequence "
            f"of {length} tokens; got {array.dtype} {list(array.shape)}"
        )
    if known is not None and known.shape[1:] != array.shape[1:]:
        raise TrajectoryError(f"{name}: routed experts changed shape from {known.shape[1:]} to {array.shape[1:]}")
    if array.size and not (array.min() >= 0 and array.max() <= _INT16_MAX):
        raise TrajectoryError(f"{name}: expert ids must be in [0, {_INT16_MAX}]; got {array.min()}..{array.max()}")
    rows = 0 if known is None else len(known)
    fresh = array[rows:].astype(np.uint8 if not array.size or array.max() < 256 else np.int16)
    return fresh if known is None else np.concatenate([known, fresh])
