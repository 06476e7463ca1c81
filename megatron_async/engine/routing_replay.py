"""Routing replay: experts on record are chosen again by the trainer's routers.

R3 replays what the engine's routers chose, R2 what the trainer's own chose under the weights at the start of a step,
which ``recording`` finds. The router's own logits still give the weights, over the recorded experts, so gradients flow
to it; only the choice is taken over (arXiv 2510.11370).

Invariants:
- A layer looks its record up by the packed-sequence parameters that its call was given, which recomputation in the
  backward pass repeats: no order of micro-batches, stages or recomputations can replay another micro-batch's routing.
- Replay state exists inside ``replaying`` and ``recording`` only; outside, the routers are as Megatron made them, and
  that is asserted.
- A token without a record is routed natively: in a sequence without a usable record, at a sequence's end, in padding.
  Sequences are counted, and a record that repeats an expert, which would lose weight, is not usable.
- A record's columns are the model's MoE layers in order; dense layers have none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_async.engine.gather import all_gather_json
from megatron_async.engine.hf_config import HFConfig
from megatron_async.engine.sequences import Array, MicroBatch, Routing, Sequence

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Tally:
    """What replaying did since it was last asked; token counts are this rank's.

    slots: recorded choices (token, layer, k) that were replayed. differing: those that the trainer's router would not
    have made. left: those that the pass did not make, which replay keeps at 0.
    """

    sequences: int = 0
    replayed: int = 0
    slots: int = 0
    differing: int = 0
    left: int = 0


class _LayerRouting:
    """What a router asks for its experts (the interface of Megatron's ``router_replay``)."""

    def enter(self, _layer: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the layer runs; ``kwargs`` name the micro-batch that it was given."""
        raise NotImplementedError

    def leave(self, *_: Any) -> None:
        """After the layer ran."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The scores and experts of every token, [tokens, topk] each."""
        assert default_compute_topk is not None, "megatron-core passes its own top-k"
        chosen, native = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = self._choose(native)
        return (chosen if experts is native else scores.gather(1, experts)), experts

    def _choose(self, native: Tensor) -> Tensor:
        """Experts [tokens, topk] to use where the router would take ``native``."""
        raise NotImplementedError


class _LayerReplay(_LayerRouting):
    """Gives the recorded experts where they are known, the native ones elsewhere."""

    def __init__(self, column: int, split: bool, records: dict[int, Routing], tally: Tally) -> None:
        self._column = column
        self._split = split
        self._records = records
        self._tally = tally
        self._record: Routing | None = None

    def enter(self, _layer: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the layer runs: find the record of the micro-batch that it was given."""
        self._record = self._records.get(id(kwargs["packed_seq_params"]))

    def leave(self, *_: Any) -> None:
        """After the layer ran."""
        self._record = None

    def _choose(self, native: Tensor) -> Tensor:
        if self._record is None:
            return native
        experts, known = self._local(self._record)
        experts = torch.where(known[:, None], experts, native)
        self._count(experts, native, known)
        return experts

    def _local(self, record: Routing) -> tuple[Tensor, Tensor]:
        """This layer's column, for the tokens that this rank's router sees: int64 [tokens, topk], bool [tokens]."""
        experts, known = record.experts[:, self._column].long(), record.known
        if self._split:  # sequence parallel: each tensor-parallel rank routes its chunk of the stream
            size, rank = (
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_tensor_model_parallel_rank(),
            )
            experts, known = experts.chunk(size)[rank], known.chunk(size)[rank]
        return experts, known

    @torch.no_grad()
    def _count(self, used: Tensor, native: Tensor, known: Tensor) -> None:
        agreeing = (used[known][:, :, None] == native[known][:, None, :]).any(-1).sum()
        slots = int(known.sum()) * used.shape[-1]
        self._tally.slots += slots
        self._tally.differing += slots - int(agreeing)
        recorded = self._local(self._record)[0] if self._record is not None else used
        self._tally.left += int((used[known] != recorded[known]).sum())


class _LayerRecorder(_LayerRouting):
    """Lets the router choose by itself, and keeps what it chose of each micro-batch."""

    def __init__(self, column: int, chosen: dict[tuple[int, int], Tensor]) -> None:
        self._column = column
        self._chosen = chosen
        self._micro_batch = 0

    def enter(self, _layer: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._micro_batch = id(kwargs["packed_seq_params"])

    def _choose(self, native: Tensor) -> Tensor:
        self._chosen[self._micro_batch, self._column] = native
        return native


class RoutingReplay:
    """Replays recorded experts in the routers of a model's chunks on this rank."""

    def __init__(self, hf: HFConfig, chunks: list[GPTModel], *, sequence_parallel: bool) -> None:
        self._hf = hf
        self._split = sequence_parallel
        self._tally = Tally()
        ordinal = np.cumsum(hf.moe_layers) - 1
        self._layers = [
            (layer, int(ordinal[layer.layer_number - 1]))
            for chunk in chunks
            for layer in chunk.decoder.layers
            if hf.moe_layers[layer.layer_number - 1]
        ]

    def screened(self, sequences: list[Sequence]) -> list[Sequence]:
        """The same sequences, without the records that cannot be replayed; counted.

        A pass in which nothing has a record (the prompt that verifies a publish) has nothing to replay or to count.
        """
        if all(sequence.routed_experts is None for sequence in sequences):
            return sequences
        usable = [self._usable(sequence) for sequence in sequences]
        self._tally.sequences += len(sequences)
        self._tally.replayed += sum(usable)
        return [
            s if good else replace(s, routed_experts=None) for s, good in zip(sequences, usable, strict=True)
        ]

    @contextmanager
    def replaying(self, micro_batches: list[MicroBatch]) -> Iterator[None]:
        """Within the block the routers choose the experts that the micro-batches' records name."""
        records = {id(m.attention): m.routing for m in micro_batches if m.routing is not None}
        with self._installed(lambda column: _LayerReplay(column, self._split, records, self._tally)):
            yield

    @contextmanager
    def recording(self, micro_batches: list[MicroBatch], record: Tensor) -> Iterator[None]:
        """Within the block the routers choose by themselves; on leaving, what they chose is in ``record``.

        Args:
            record: zeros, integers [tokens of the batch, MoE layers, top-k]; each rank fills in what it computed, so
                that the sum over all ranks is whole but for every sequence's last token.
        """
        chosen: dict[tuple[int, int], Tensor] = {}
        with self._installed(lambda column: _LayerRecorder(column, chosen)):
            yield
        if not self._split and parallel_state.get_tensor_model_parallel_rank() > 0:
            return  # every tensor-parallel rank routed all tokens alike
        for micro_batch in micro_batches:
            for (key, column), experts in chosen.items():
                if key == id(micro_batch.attention):
                    rows, tokens = self._placed(micro_batch, len(experts))
                    record[tokens, column] = experts[rows].to(record.dtype)

    def _placed(self, micro_batch: MicroBatch, rows: int) -> tuple[Tensor, Tensor]:
        """Rows of a router's choices on this rank, and which tokens of the batch they belong to.

        The position that predicts a token is that of the token before it; a sequence's last token predicts none.
        """
        packed = micro_batch.packed
        follows = packed.positions > 0
        at, tokens = micro_batch.take[follows], packed.flat_index[follows] - 1
        first = parallel_state.get_tensor_model_parallel_rank() * rows if self._split else 0
        here = (at >= first) & (at < first + rows)
        return at[here] - first, tokens[here]

    @contextmanager
    def _installed(self, make: Callable[[int], _LayerRouting]) -> Iterator[None]:
        """Within the block every router asks what ``make`` gives for its column."""
        hooks = []
        try:
            for layer, column in self._layers:
                assert layer.mlp.router.router_replay is None, (
                    "a router already replays: passes must not be nested"
                )
                replay = make(column)
                layer.mlp.router.router_replay = replay
                hooks.append(layer.register_forward_pre_hook(replay.enter, with_kwargs=True))
                hooks.append(layer.register_forward_hook(replay.leave))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer, _ in self._layers:
                layer.mlp.router.router_replay = None

    def take_metrics(self) -> dict[str, float]:
        """Metrics since they were last taken, equal on all ranks (collective)."""
        tally, self._tally = self._tally, Tally()
        counts = [Tally(**values) for values in all_gather_json(asdict(tally))]
        slots = max(1, sum(count.slots for count in counts))
        return {
            "routing_replay/replayed": tally.replayed / max(1, tally.sequences),
            "routing_replay/fallback": float(tally.sequences - tally.replayed),
            "routing_replay/disagreement": sum(count.differing for count in counts) / slots,
            "routing_replay/disagreement_after": sum(count.left for count in counts) / slots,
        }

    def _usable(self, sequence: Sequence) -> bool:
        record, length = sequence.routed_experts, len(sequence)
        if record is None or length == 1:
            return False
        wanted = (sum(self._hf.moe_layers), self._hf.num_experts_per_tok)
        if record.shape[1:] != wanted or len(record) not in (length - 1, length):
            return False
        return has_distinct_experts(record, self._hf.num_experts)


def record_dtype(num_experts: int) -> Any:
    """The narrowest integers that a record of so many experts fits in."""
    return np.uint8 if num_experts <= 256 else np.int16


def has_distinct_experts(record: Array, num_experts: int) -> bool:
    """Whether every row [.., topk] names different experts that exist."""
    ordered = np.sort(record, axis=-1)
    in_range = bool((ordered[..., 0] >= 0).all() and (ordered[..., -1] < num_experts).all())
    return in_range and bool((np.diff(ordered.astype(np.int64), axis=-1) > 0).all())
