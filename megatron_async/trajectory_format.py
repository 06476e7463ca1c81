"""How a trajectory is written down: a checked prefix, then zstd of a msgpack header and raw little-endian arrays.

    prefix   magic "MATJ" | format number uint16 | BLAKE2b-128 of all that follows and precedes it
    body     zstd( header length uint32 | header | token ids int32[L] | action log-probs float32[A] | routing )

The loss mask and the versions are not stored: the spans in the header say both. Nothing is decompressed before
the digest agreed, and nothing is ever unpickled. A change of layout takes a new format number.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from megatron_async.trajectory_values import TrajectoryError

_MAGIC = b"MATJ"
_FORMAT = 1
_PREFIX = struct.Struct("<4sH16s")
_ROUTING_DTYPES = ("|u1", "<i2")


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Everything but the arrays; msgspec checks the types when it is read."""

    trajectory_id: str
    group_id: str
    prompt_id: str
    sampling: tuple[float, float, int, int]
    task: dict[str, Any]
    status: str
    reward: float | None
    info: dict[str, Any]
    tokens: int
    spans: list[tuple[int, int, int, int | None]]
    turns: list[tuple[int, int, str]]
    open_turn: int | None
    routing: tuple[str, int, int, int] | None


@dataclass(frozen=True, slots=True)
class Record:
    """What a trajectory consists of; see `Header`. Arrays read back are read-only views."""

    header: Header
    token_ids: npt.NDArray[np.int32]
    action_logprobs: npt.NDArray[np.float32]
    routing: npt.NDArray[Any] | None


def routing_header(routing: npt.NDArray[Any] | None) -> tuple[str, int, int, int] | None:
    """The header's entry for recorded routing: dtype and [rows, layers, top-k]."""
    if routing is None:
        return None
    rows, layers, top_k = routing.shape
    return _little(routing).dtype.str, rows, layers, top_k


def encode(record: Record) -> bytes:
    """The body before compression; equal trajectories give equal bytes."""
    header = msgspec.msgpack.encode(record.header)
    parts = [struct.pack("<I", len(header)), header]
    arrays = (record.token_ids, record.action_logprobs, record.routing)
    parts += [_little(array).tobytes() for array in arrays if array is not None]
    return b"".join(parts)


def write(record: Record) -> bytes:
    body = zstandard.ZstdCompressor(level=3).compress(encode(record))
    return _PREFIX.pack(_MAGIC, _FORMAT, _digest(body)) + body


def read(data: bytes) -> Record:
    """Raises TrajectoryError for a foreign magic or format, a wrong digest, or sizes that do not add up."""
    if len(data) < _PREFIX.size:
        raise TrajectoryError(
            f"damaged trajectory: {len(data)} bytes, less than its {_PREFIX.size}-byte prefix"
        )
    magic, number, digest = _PREFIX.unpack_from(data)
    if magic != _MAGIC or number != _FORMAT:
        raise TrajectoryError(
            f"not a trajectory this release reads: magic {magic!r}, format {number}; expected {_MAGIC!r}, {_FORMAT}"
        )
    body = data[_PREFIX.size :]
    if _digest(body) != digest:
        raise TrajectoryError(f"damaged trajectory: the digest of its {len(body)}-byte body does not match")
    try:
        raw = memoryview(zstandard.ZstdDecompressor().decompress(body))
        (size,) = struct.unpack_from("<I", raw)
        header = msgspec.msgpack.decode(raw[4 : 4 + size], type=Header)
    except (zstandard.ZstdError, struct.error, msgspec.MsgspecError) as error:
        raise TrajectoryError(f"damaged trajectory: {error}") from error
    return _split(header, raw[4 + size :])


def _split(header: Header, arrays: memoryview) -> Record:
    actions = sum(end - start for _, start, end, _ in header.spans)
    routing = header.routing
    known = routing is None or (routing[0] in _ROUTING_DTYPES and 0 <= routing[1] < header.tokens)
    dtype = np.dtype(routing[0] if routing and known else "u1")
    routing_bytes = dtype.itemsize * routing[1] * routing[2] * routing[3] if routing else 0
    expected = 4 * header.tokens + 4 * actions + routing_bytes
    if not known or min(header.tokens, actions, routing_bytes) < 0 or len(arrays) != expected:
        raise TrajectoryError(
            f"damaged trajectory {header.trajectory_id!r}: {header.tokens} tokens, {actions} action tokens and "
            f"routing {routing} need {expected} bytes, found {len(arrays)}"
        )
    ids = np.frombuffer(arrays, "<i4", header.tokens)
    logprobs = np.frombuffer(arrays, "<f4", actions, 4 * header.tokens)
    experts = None
    if routing:
        experts = np.frombuffer(arrays, dtype, offset=4 * (header.tokens + actions)).reshape(routing[1:])
    return Record(header, ids, logprobs, experts)


def _little(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(_MAGIC + struct.pack("<H", _FORMAT) + body, digest_size=16).digest()
