"""Do the ranks' pieces tile every tensor of the checkpoint, each element in exactly the replicas the layout says?

Invariant: `problems` is empty only if for every tensor of the name table the distinct rectangles are disjoint, add up
to the whole tensor, and each is held by as many ranks as the layout makes replicas of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron_async.config.schema import LayoutConfig
from megatron_async.engine.hf_weights import Index, NameTable, Row

_SHOWN = 8


def overlap(one: Index, other: Index) -> bool:
    """Whether two rectangles share an element."""
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def size(index: Index) -> int:
    """Elements of a rectangle."""
    total = 1
    for start, stop in index:
        total *= stop - start
    return total


class Coverage:
    """Collects which rectangle of which tensor is held by how many ranks."""

    def __init__(self, table: NameTable, layout: LayoutConfig) -> None:
        self._table, self._layout = table, layout
        self._held: dict[str, Counter[Index]] = {row.hf_name: Counter() for row in table.rows}

    def add(self, pieces: Iterable[tuple[str, Index]], ranks: int) -> None:
        """`ranks` ranks hold these (Hugging Face name, rectangle) pairs."""
        for name, index in pieces:
            self._held[name][index] += ranks

    @property
    def elements(self) -> int:
        """Elements of all distinct rectangles: the model's parameters, each once."""
        return sum(size(index) for held in self._held.values() for index in held)

    def problems(self) -> list[str]:
        """One sentence for each tensor that is not covered exactly once; at most a few, with the count of all."""
        found = [problem for row in self._table.rows for problem in self._problems_of(row)]
        more = len(found) - _SHOWN
        return found[:_SHOWN] + ([f"… and {more} more tensors"] if more > 0 else [])

    def _problems_of(self, row: Row) -> list[str]:
        held = self._held[row.hf_name]
        covered = sum(map(size, held))
        rectangles = sorted(held)
        if covered != row.numel:
            return [f"{row.hf_name}: the ranks' rectangles hold {covered:,} of {row.numel:,} elements"]
        clash = [
            (one, two) for i, one in enumerate(rectangles) for two in rectangles[i + 1 :] if overlap(one, two)
        ]
        if clash:
            return [f"{row.hf_name}: rectangles {clash[0][0]} and {clash[0][1]} overlap"]
        replicas = self._replicas(row)
        wrong = {index: count for index, count in held.items() if count != replicas}
        if wrong:
            index, count = next(iter(wrong.items()))
            return [
                f"{row.hf_name}: rectangle {index} is held by {count} rank(s), the layout makes {replicas}"
            ]
        return []

    def _replicas(self, row: Row) -> int:
        """Ranks that hold one rectangle of a tensor."""
        layout = self._layout
        if row.is_expert:
            return layout.expert_data_parallel_size
        data = layout.data_parallel_size * layout.context_parallel_size
        whole = data * (layout.tensor_model_parallel_size if row.shard_axis is None else 1)
        last_too = (
            self._table.config.tie_word_embeddings
            and layout.pipeline_model_parallel_size > 1
            and row.parameter == "embedding.word_embeddings.weight"
        )
        return whole * 2 if last_too else whole
