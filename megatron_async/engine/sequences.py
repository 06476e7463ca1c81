"""Sequences as they come in, and the packed micro-batches that the model sees.

Invariants:
- Everything per token is aligned to the token it speaks of; the shift to "position t predicts token t+1" happens here
  and nowhere else.
- A micro-batch holds each of its tokens once; padding never reaches ``Packed``.
- Padding is a pseudo-sequence of its own (or the tail of one, under context parallel), so no real token attends to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from megatron_async.engine.attention import zigzag_positions

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One token sequence with its token-aligned companions.

    Attributes:
        token_ids: int32 [L].
        temperature: sampling temperature; log-probs are those of softmax(logits / temperature).
        arrays: any per-token arrays [L], handed to the loss (``action_mask``, ``advantages``, …).
        routed_experts: integers [L or L − 1, MoE layers, top-k], the experts that the engine chose while reading each
            token; None where there is no record. Only read where routing is replayed.

    Raises:
        ValueError: empty, an array of another length, or a temperature that is not positive.
    """

    token_ids: Array
    temperature: float = 1.0
    arrays: Mapping[str, Array] = field(default_factory=dict)
    routed_experts: Array | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) == 0:
            raise ValueError("a sequence needs at least one token")
        wrong = {name: len(array) for name, array in self.arrays.items() if len(array) != len(self.token_ids)}
        if wrong:
            raise ValueError(
                f"arrays must have one value per token: {len(self.token_ids)} tokens, but {wrong}"
            )
        if not self.temperature > 0:
            raise ValueError(
                f"temperature {self.temperature} has no log-probs (greedy decoding puts all mass on one token); train "
                f"on samples with temperature > 0"
            )

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The tokens of one micro-batch on this rank, T of them.

    Attributes:
        token_ids: int64 [T].
        sequence_ids: int64 [T], index into the list of sequences given to the policy.
        positions: int64 [T], position inside the sequence; position 0 has log-prob 0 and entropy 0.
        flat_index: int64 [T], index into the concatenation of all sequences of the batch.
        arrays: the sequences' arrays, each [T].

    Without context parallel the sequences follow one another whole; with it, each rank holds its share of each.
    """

    token_ids: Tensor
    sequence_ids: Tensor
    positions: Tensor
    flat_index: Tensor
    arrays: dict[str, Tensor]

    def __len__(self) -> int:
        return int(self.token_ids.numel())


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Recorded experts of a micro-batch, laid out as its stream on this rank.

    Attributes:
        experts: [S, MoE layers, top-k] integers, as compact as they came.
        known: bool [S], positions that have a record.
    """

    experts: Tensor
    known: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward takes. S = positions on this rank (padded), T = real tokens they speak of.

    Attributes:
        input_ids, position_ids: int64 [1, S].
        targets: int64 [S], the token that each position predicts (its own sequence's first token at the end).
        inverse_temperature: float32 [S].
        take: int64 [T], the position that predicts each token of ``packed``.
        num_tokens: real tokens over all context-parallel ranks; T where there is one.
        routing: None where no sequence of it has a record.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention: PackedSeqParams
    targets: Tensor
    inverse_temperature: Tensor
    take: Tensor
    packed: Packed
    num_tokens: int
    routing: Routing | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """How a stream is padded and cut: tensor and context parallel sizes, this rank's context rank, the device; unit:
    what the kernels want the positions on a rank to be a multiple of."""

    tensor_parallel: int
    context_parallel: int
    context_rank: int
    device: torch.device
    unit: int = 1

    @property
    def length_multiple(self) -> int:
        """Each sequence is padded to a multiple of this."""
        return 1 if self.context_parallel == 1 else 2 * self.context_parallel

    @property
    def stream_multiple(self) -> int:
        """The whole stream is padded to a multiple of this."""
        return self.length_multiple * self.tensor_parallel * self.unit


class BatchIndex:
    """A batch's sequences laid end to end: one array per name over all tokens, built once per pass.

    routing: whether micro-batches carry the sequences' records of routed experts.
    """

    def __init__(self, sequences: list[Sequence], *, routing: bool = False) -> None:
        names = sequences[0].arrays.keys()
        for i, sequence in enumerate(sequences):
            if sequence.arrays.keys() != names:
                raise ValueError(
                    f"all sequences must carry the same arrays: sequence 0 has {sorted(names)}, sequence {i} has "
                    f"{sorted(sequence.arrays)}"
                )
        self.sequences = sequences
        self.routing = routing
        self.lengths = [len(sequence) for sequence in sequences]
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self.token_ids = np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int64)
        self.arrays = {name: np.concatenate([s.arrays[name] for s in sequences]) for name in names}

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole batch."""
        return int(self.offsets[-1])

    def split(self, flat: Array) -> list[Array]:
        """Cut an array over all tokens back into one per sequence."""
        return np.split(flat, self.offsets[1:-1])


def build_micro_batch(batch: BatchIndex, members: tuple[int, ...], cut: Cut) -> MicroBatch:
    """Lay the chosen sequences into one stream and take this rank's part of it (no members: padding only)."""
    lengths = [batch.lengths[i] for i in members]
    unit = cut.length_multiple
    padded = [-(-n // unit) * unit for n in lengths]
    tail = -sum(padded) % cut.stream_multiple or (0 if padded else cut.stream_multiple)
    padded += [tail] if tail else []
    stream = _Stream(batch, members, lengths, padded)
    local = _local_positions(padded, cut)
    speaking = np.flatnonzero(stream.valid[local])
    spoken = stream.next_index[local[speaking]]
    order = np.argsort(spoken)
    temperature = [batch.sequences[i].temperature for i in members] + [1.0]

    def tensor(array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(cut.device)

    return MicroBatch(
        input_ids=tensor(stream.token_ids[local])[None],
        position_ids=tensor(stream.positions[local])[None],
        attention=_attention_params(padded, cut.device),
        targets=tensor(stream.token_ids[stream.next_index[local]]),
        inverse_temperature=tensor(1.0 / np.asarray(temperature, np.float32)[stream.member[local]]),
        take=tensor(speaking[order]),
        packed=_packed(batch, members, stream, spoken[order], tensor),
        num_tokens=sum(lengths),
        routing=_routing(batch, members, padded, local, tensor),
    )


class _Stream:
    """The padded stream of one micro-batch before it is cut over context-parallel ranks; arrays of length S."""

    def __init__(
        self, batch: BatchIndex, members: tuple[int, ...], lengths: list[int], padded: list[int]
    ) -> None:
        starts = np.concatenate([[0], np.cumsum(padded)]).astype(np.int64)
        size = int(starts[-1])
        self.token_ids = np.zeros(size, np.int64)
        self.positions = np.zeros(size, np.int64)
        self.member = np.full(size, len(members), np.int64)
        self.flat_index = np.zeros(size, np.int64)
        self.valid = np.zeros(size, bool)
        self.next_index = np.arange(size)
        for k, (i, length, reserved) in enumerate(zip(members, lengths, padded, strict=False)):
            start = int(starts[k])
            real = slice(start, start + length)
            flat = np.arange(batch.offsets[i], batch.offsets[i] + length)
            self.token_ids[real] = batch.token_ids[flat]
            self.flat_index[real] = flat
            self.positions[start : start + reserved] = np.arange(reserved)
            self.member[start : start + reserved] = k
            self.valid[real] = True
            self.next_index[real] = np.roll(np.arange(start, start + length), -1)


def _local_positions(padded: list[int], cut: Cut) -> Array:
    if cut.context_parallel == 1:
        return np.arange(sum(padded))
    starts = np.concatenate([[0], np.cumsum(padded)[:-1]])
    parts = [
        start + zigzag_positions(n, cut.context_parallel)[cut.context_rank].numpy()
        for start, n in zip(starts, padded, strict=True)
    ]
    return np.concatenate(parts)


def _attention_params(padded: list[int], device: torch.device) -> PackedSeqParams:
    boundaries = torch.tensor(np.concatenate([[0], np.cumsum(padded)]), dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )


def _packed(
    batch: BatchIndex, members: tuple[int, ...], stream: _Stream, spoken: Array, tensor: Any
) -> Packed:
    flat = stream.flat_index[spoken]
    return Packed(
        token_ids=tensor(stream.token_ids[spoken]),
        sequence_ids=tensor(np.asarray(members, np.int64)[stream.member[spoken]]),
        positions=tensor(stream.positions[spoken]),
        flat_index=tensor(flat),
        arrays={name: tensor(array[flat]) for name, array in batch.arrays.items()},
    )


def _routing(
    batch: BatchIndex, members: tuple[int, ...], padded: list[int], local: Array, tensor: Any
) -> Routing | None:
    records = [batch.sequences[i].routed_experts for i in members]
    present = [record for record in records if record is not None]
    if not present or not batch.routing:
        return None
    experts = np.zeros((sum(padded), *present[0].shape[1:]), np.int16)
    known = np.zeros(sum(padded), bool)
    starts = np.concatenate([[0], np.cumsum(padded)]).astype(np.int64)
    for start, record in zip(starts, records, strict=False):
        if record is not None:
            experts[start : start + len(record)] = record
            known[start : start + len(record)] = True
    return Routing(tensor(experts[local]), tensor(known[local]))
