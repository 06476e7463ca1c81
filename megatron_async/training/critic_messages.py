"""What the trainer's rank 0 and the critic's rank 0 tell each other, as bytes: raw arrays and JSON, nothing is pickled.

Invariants: arrays arrive with the bits and dtypes they were sent with; a request has one answer, and answers come in
the order of the requests. A request is a byte for its kind, then what it needs; an answer begins with `DONE` or
`FAILED`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_async.engine.critic import Values
from megatron_async.engine.sequences import Sequence
from megatron_async.training.batch import join_messages, split_messages
from megatron_async.training.critics import ValueUpdate

VALUES, UPDATE, SAVE_HF = b"V", b"U", b"H"
PREPARE, BEGIN, POLL, FINISH, LOAD = b"P", b"B", b"Q", b"F", b"L"
DONE, FAILED = b"+", b"-"


def to_json(value: Any) -> bytes:
    """Numbers come back bit for bit."""
    return json.dumps(value).encode()


def encode_sequences(sequences: SequenceOf[Sequence], arrays: SequenceOf[str] = ()) -> bytes:
    """Token ids, and the named arrays."""
    columns = [np.concatenate([np.asarray(s.token_ids) for s in sequences])]
    columns += [np.concatenate([s.arrays[name] for s in sequences]) for name in arrays]
    header = {
        "lengths": [len(sequence) for sequence in sequences],
        "arrays": list(arrays),
        "dtypes": [column.dtype.str for column in columns],
    }
    return join_messages([to_json(header), *(column.tobytes() for column in columns)])


def decode_sequences(data: bytes) -> list[Sequence]:
    """Undo `encode_sequences`."""
    first, *rest = split_messages(data)
    header = json.loads(first)
    ends = np.cumsum(header["lengths"])[:-1]
    columns = [
        np.split(np.frombuffer(column, dtype), ends)
        for column, dtype in zip(rest, header["dtypes"], strict=True)
    ]
    return [
        Sequence(ids, 1.0, dict(zip(header["arrays"], arrays, strict=True)))
        for ids, *arrays in zip(*columns, strict=True)
    ]


def encode_values(values: Values) -> bytes:
    """Of a batch's sequences, in their order."""
    before = np.concatenate(values.before).astype("<f4")
    return join_messages([before.tobytes(), values.after.astype("<f4").tobytes()])


def decode_values(data: bytes, lengths: SequenceOf[int]) -> Values:
    """Undo `encode_values`. lengths: of the sequences."""
    before, after = (np.frombuffer(part, "<f4").astype(np.float32) for part in split_messages(data))
    return Values(np.split(before, np.cumsum(lengths)[:-1]), after)


def encode_updates(updates: SequenceOf[ValueUpdate], num_updates: int) -> bytes:
    """num_updates: made so far in all."""
    return to_json({"updates": [asdict(update) for update in updates], "num_updates": num_updates})


def decode_updates(data: bytes) -> tuple[list[ValueUpdate], int]:
    """Undo `encode_updates`."""
    found = json.loads(data)
    return [ValueUpdate(**update) for update in found["updates"]], int(found["num_updates"])
