"""Sequences with recorded experts, without transformers: ranks import this, and start fast."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_async.engine.sequences import Sequence
from tests.engine_batches import make_sequences

MOE_LAYERS, EXPERTS, TOPK = 3, 4, 2
WITHOUT_RECORD, UNUSABLE = 1, 3
"""Indices: one sequence was never recorded, one record names an expert twice."""


def recorded_sequences() -> list[Sequence]:
    """Random experts for all tokens but the last, unlike what the model would choose."""
    random = np.random.default_rng(11)
    result = []
    for i, sequence in enumerate(make_sequences()):
        rows = len(sequence) - 1
        keys = random.random((rows, MOE_LAYERS, EXPERTS))
        record = np.argsort(keys, -1)[..., :TOPK].astype(np.uint8)
        if i == UNUSABLE:
            record[3, 1] = 2
        result.append(replace(sequence, routed_experts=None if i == WITHOUT_RECORD else record))
    return result


def replayed(sequence: Sequence) -> bool:
    """Whether the sequence's record is good for replay."""
    record = sequence.routed_experts
    return record is not None and len(record) > 0 and bool((record[..., 0] != record[..., 1]).all())
