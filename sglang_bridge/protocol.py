"""SGLang's native ``/generate`` answers, checked and turned into values that cannot disagree with themselves.

Invariants
- Tokens are ids, in and out. Every output token has a log-prob, finite and at most 0, of that very id.
- The version spans of an answer tile its output exactly. They come from the engine's scheduler, which alone
  knows between which tokens its weights changed; no label read elsewhere is ever stamped on tokens. An answer
  with tokens and without spans is an error, not "all of the latest version".
- An answer is either accepted whole or refused with ``EngineError`` naming the field and the values.

Streams may be incremental (each event brings new tokens) or cumulative (each event repeats all): SGLang sends
the total with every event, so an event's new tokens are its last ``total - received`` ones. The same rule covers
the engine's habit of repeating the last token when a queued request of an incremental stream is aborted.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_bridge.errors import EngineError

# A log-prob is at most 0; float32 log-softmax of a certain token may come out this far above, and is taken as 0.
LOGPROB_SLACK = 1e-3
_LEAST_LOGPROB = -3.4e38
"""What is below is no float32."""

_MOST = 2**31 - 1
"""Of versions and counts: what is larger is none, and fits into no array of versions."""
_DIGITS = 32

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How one continuation is sampled. ``max_new_tokens`` counts output tokens; ``top_k`` -1 is off.

    Log-probs come back under ``temperature`` but not renormalised for ``top_p`` and ``top_k``.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"need temperature >= 0 and 0 < top_p <= 1, got {self.temperature} and {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is -1 (off) or at least 1, got {self.top_k}")

    def as_request(self) -> dict[str, Any]:
        """The ``sampling_params`` of a request. Special tokens are kept: ids are what counts, not text."""
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if self.stop_token_ids:
            params["stop_token_ids"] = list(self.stop_token_ids)
        return params


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens ``[start, end)`` were sampled under policy ``version``.

    ``kv_version``: oldest version whose keys and values those tokens attended to, None when it is ``version``.
    """

    version: int
    start: int
    end: int
    kv_version: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of a running request: ``output_ids`` begin at ``start`` of the output.

    ``version_on_arrival`` is the engine's label when it sent them. Around an update it may already name the next
    version, so it is for display; the spans of the finished ``Generation`` are what tokens are labelled with.
    ``version``: the one all these tokens were sampled under, where that is certain before the answer is finished: the
    engine was known to have it before the request was sent, and still had it when they and all before them arrived.
    None otherwise.
    """

    start: int
    output_ids: list[int]
    logprobs: list[float]
    version_on_arrival: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished continuation of length T = ``len(output_ids)``.

    ``logprobs``: T floats, log-prob of each output token. ``spans`` tile ``[0, T)`` (empty when T = 0).
    ``finish_reason``: ``stop`` (a stop token, included), ``length`` or ``abort`` (tokens so far are valid).
    ``routed_experts``: int32 [prompt + T - 1, MoE layers, top-k] or None. ``cached_tokens``: prompt tokens whose
    keys and values were reused. ``num_retractions``: times the engine put the request back to recompute it.
    """

    output_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: str
    routed_experts: npt.NDArray[np.int32] | None = None
    num_retractions: int = 0
    cached_tokens: int = 0


def parse_version(label: object) -> int:
    """The policy version a weight-version label stands for: a non-negative decimal integer of 31 bits."""
    if isinstance(label, str) and label.isascii() and label.isdigit() and len(label) <= _DIGITS:
        version = int(label)
        if version <= _MOST:
            return version
    raise EngineError(
        f"weight version {label!r:.80} is not a version number up to {_MOST}; start the engine with --weight-version 0 "
        "(EngineServer does) or set it with EngineClient.set_version"
    )


def require(mapping: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """``mapping[key]``, or ``EngineError`` when it is missing or of another type."""
    value = mapping.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        shown = repr(value)
        raise EngineError(f"{where}: field {key!r} is {shown[:80]}, expected {_kind_name(kind)}")
    return value


def _count(meta: Mapping[str, Any], key: str) -> int:
    """``meta[key]``, a number of things; 0 where it is missing or null."""
    value = meta.get(key)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= _MOST:
        raise EngineError(f"meta_info: field {key!r} is {value!r:.80}, expected a count")
    return value


def _kind_name(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))


def parse_logprobs(entries: Sequence[Any], ids: Sequence[int], where: str) -> list[float]:
    """Log-probs of ``ids`` from SGLang's ``[logprob, token id, text]`` entries, one for each id."""
    if len(entries) != len(ids):
        raise EngineError(f"{where}: {len(entries)} log-probs for {len(ids)} tokens")
    logprobs: list[float] = []
    for index, (entry, token) in enumerate(zip(entries, ids, strict=True)):
        if not isinstance(entry, list | tuple) or len(entry) < 2:
            raise EngineError(f"{where}: log-prob entry {index} is {entry!r}, expected [logprob, token id, text]")
        value = entry[0]
        if entry[1] != token:
            raise EngineError(f"{where}: log-prob {index} speaks of token {entry[1]!r}, the output has {token}")
        known = type(value) in (float, int) and math.isfinite(value)
        if not known or not _LEAST_LOGPROB <= value <= LOGPROB_SLACK:
            raise EngineError(f"{where}: log-prob of token {index} (id {token}) is {value!r}, not a finite number <= 0")
        logprobs.append(min(float(value), 0.0))
    return logprobs


def parse_spans(entries: object, length: int) -> list[Span]:
    """The half-open version spans of an output of ``length`` tokens; they must tile it exactly.

    Adjacent spans of one version are merged.
    """
    if length == 0:
        return []
    if not isinstance(entries, list) or not entries:
        raise EngineError(
            f"the answer has {length} tokens and no weight_versions ({entries!r}); the bridge needs an SGLang that "
            "reports version spans (0.5.23 does)"
        )
    spans: list[Span] = []
    position = 0
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise EngineError(f"weight_versions entry {entry!r} is not an object with version, start, end")
        start, end = require(entry, "start", int, "weight_versions"), require(entry, "end", int, "weight_versions")
        version = parse_version(entry.get("version"))
        if start != position or end <= start or end > length:
            raise EngineError(f"version spans {entries!r} do not tile the {length} output tokens: [{start}, {end}) "
                              f"cannot follow position {position}")
        if spans and spans[-1].version == version:
            spans[-1] = Span(version, spans[-1].start, end)
        else:
            spans.append(Span(version, start, end))
        position = end
    if position != length:
        raise EngineError(f"version spans {entries!r} end at {position}, the output has {length} tokens")
    return spans


def flag_old_keys(
    spans: Sequence[Span], *, retractions: int, in_place: bool, oldest_cached: int | None
) -> list[Span]:
    """``spans`` with ``kv_version`` set where tokens attended to keys and values of an older version.

    Every version change of a request that was retracted for it recomputes all keys and values. Changes beyond the
    number of retractions went over the old ones, so all later tokens attend to the first span's, at the oldest.
    ``in_place``: updates of this engine never retract. ``oldest_cached``: oldest version the reused prefix may
    have been computed under, None when no prefix was reused.
    """
    if not spans:
        return []
    floor = spans[0].version if oldest_cached is None else min(oldest_cached, spans[0].version)
    over_old_keys = in_place or len(spans) - 1 > retractions
    flagged = [_older(spans[0], floor)]
    flagged += [_older(span, floor) if over_old_keys else span for span in spans[1:]]
    return flagged


def _older(span: Span, kv_version: int) -> Span:
    return dataclasses.replace(span, kv_version=kv_version) if kv_version < span.version else span


def parse_routed_experts(text: str, rows: int, shape: tuple[int, int]) -> npt.NDArray[np.int32]:
    """Base64 int32 of ``rows`` = tokens - 1 of the whole sequence, as [rows, MoE layers, top-k]."""
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"routed_experts is not base64 of int32: {error}") from error
    layers, top_k = shape
    if flat.size != rows * layers * top_k:
        raise EngineError(f"routed_experts has {flat.size} entries, expected {rows} rows (prompt + output - 1) x "
                          f"{layers} layers x top-{top_k} = {rows * layers * top_k}")
    return flat.astype(np.int32).reshape(rows, layers, top_k)


@dataclass(slots=True)
class Answer:
    """Collects one answer, event by event, and checks it. ``finish`` gives the ``Generation``.

    ``known_version``: label that the engine had before the request was sent, None where it is not known.
    """

    prompt_tokens: int
    max_new_tokens: int
    routed_experts_shape: tuple[int, int] | None = None  # None: not asked for
    in_place_updates: bool = False
    oldest_cached_version: int = 0
    known_version: str | None = None
    vocab_size: int | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: Mapping[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """True once an event carried a finish reason."""
        return self.last is not None and self.last.get("finish_reason") is not None

    def add(self, event: object) -> Chunk | None:
        """Take one event; return its new tokens, or None when it brings none."""
        if not isinstance(event, Mapping):
            raise EngineError(f"event is {type(event).__name__}, expected an object")
        if "error" in event:
            error = event["error"]
            detail = error if isinstance(error, Mapping) else {"message": error}
            code = detail.get("code")
            raise EngineError(str(detail.get("message", error)), status=code if isinstance(code, int) else None)
        if self.finished:
            raise EngineError("the stream went on after its finish reason")
        meta = require(event, "meta_info", Mapping, "event")
        self._check_abort(meta)
        ids = require(event, "output_ids", list, "event")
        total = require(meta, "completion_tokens", int, "meta_info")
        fresh = total - len(self.output_ids)
        if not 0 <= fresh <= len(ids):
            raise EngineError(f"the engine counts {total} output tokens, {len(self.output_ids)} were received before "
                              f"and this event carries {len(ids)}: tokens are missing")
        self.last = meta
        return self._append(ids[len(ids) - fresh:], meta)

    def _append(self, new: list[Any], meta: Mapping[str, Any]) -> Chunk | None:
        start = len(self.output_ids)
        if any(type(token) is not int or token < 0 for token in new):
            raise EngineError(f"output_ids from {start} are not token ids: {new!r:.200}")
        if self.vocab_size is not None and any(token >= self.vocab_size for token in new):
            raise EngineError(f"output_ids from {start} hold {max(new)}, the vocabulary ends at {self.vocab_size}")
        if start + len(new) > self.max_new_tokens:
            raise EngineError(f"{start + len(new)} output tokens, at most {self.max_new_tokens} were asked for")
        if not new:
            return None
        entries = require(meta, "output_token_logprobs", list, "meta_info")
        logprobs = parse_logprobs(entries[max(0, len(entries) - len(new)):], new, f"output from token {start}")
        self.output_ids += new
        self.logprobs += logprobs
        label = str(meta.get("weight_version"))
        if label != self.known_version:
            self.known_version = None  # from here on, tokens may be of the version before or of the next one
        version = None if self.known_version is None or self.in_place_updates else parse_version(label)
        return Chunk(start, new, logprobs, label, version)

    @staticmethod
    def _check_abort(meta: Mapping[str, Any]) -> None:
        reason = meta.get("finish_reason")
        if isinstance(reason, Mapping) and reason.get("type") == "abort" and isinstance(reason.get("status_code"), int):
            raise EngineError(str(reason.get("message")), status=reason["status_code"])

    def finish(self) -> Generation:
        """The whole answer. Raises ``EngineError`` when it is incomplete or contradicts itself."""
        if self.last is None or not self.finished:
            raise EngineError(f"the answer ended after {len(self.output_ids)} tokens without a finish reason")
        meta, length = self.last, len(self.output_ids)
        kind = require(meta, "finish_reason", Mapping, "meta_info").get("type")
        if kind not in FINISH_REASONS:
            raise EngineError(f"unknown finish reason {kind!r}, expected one of {', '.join(FINISH_REASONS)}")
        prompt = meta.get("prompt_tokens", self.prompt_tokens if kind == "abort" else None)
        if prompt != self.prompt_tokens:
            raise EngineError(f"the engine saw {prompt} prompt tokens, {self.prompt_tokens} were sent")
        if length == 0 and kind != "abort":
            raise EngineError(f"finish reason {kind!r} with no output token")
        retractions, cached = _count(meta, "num_retractions"), _count(meta, "cached_tokens")
        oldest_cached = self.oldest_cached_version if self.in_place_updates and cached else None
        return Generation(
            output_ids=self.output_ids,
            logprobs=self.logprobs,
            spans=flag_old_keys(parse_spans(meta.get("weight_versions"), length), retractions=retractions,
                                in_place=self.in_place_updates, oldest_cached=oldest_cached),
            finish_reason=str(kind),
            routed_experts=self._routed_experts(meta, length, aborted=kind == "abort"),
            num_retractions=retractions,
            cached_tokens=cached,
        )

    def _routed_experts(self, meta: Mapping[str, Any], length: int, *, aborted: bool) -> npt.NDArray[np.int32] | None:
        if self.routed_experts_shape is None:
            return None
        text = meta.get("routed_experts")
        if text is None and (aborted or length == 0):
            return None
        if not isinstance(text, str):
            raise EngineError("routed experts were asked for and are missing; start the engine with "
                              "--enable-return-routed-experts (ServerOptions.routed_experts)")
        return parse_routed_experts(text, self.prompt_tokens + length - 1, self.routed_experts_shape)


def parse_scores(answer: object, input_ids: Sequence[int], start: int) -> list[float]:
    """Token-aligned log-probs of a scored prompt: ``[t]`` is log p(token t | tokens < t); 0.0 up to ``start``."""
    if not isinstance(answer, Mapping):
        raise EngineError(f"score answer is {type(answer).__name__}, expected an object")
    meta = require(answer, "meta_info", Mapping, "score")
    entries = require(meta, "input_token_logprobs", list, "meta_info")
    if len(entries) != len(input_ids) - start:
        raise EngineError(f"{len(entries)} prompt log-probs from position {start} of {len(input_ids)} tokens")
    return [0.0] * (start + 1) + parse_logprobs(entries[1:], input_ids[start + 1:], "prompt")
