"""One table of names: Hugging Face tensors ↔ slices of Megatron parameters.

Loading, exporting, publishing and snapshots all read this table; there is no second mapping.

Invariants:
- Every Hugging Face tensor is one ``Row``, in the order in which it is exported.
- A ``Piece`` joins a rectangle of one Hugging Face tensor with a view of the local parameter that holds it. The
  views of a rank's pieces tile its parameters; the pieces of all ranks tile every Hugging Face tensor.
- Pieces are views: copying into one writes the parameter, and copying out of one gives its exact bits.

Layouts inside Megatron that the table knows (shapes as stored, per tensor-parallel rank):
- ``linear_qkv`` interleaves by query group: rows are, for every group, [its queries…, key, value];
- ``linear_fc1`` of a gated MLP is [gate; up], each half cut on its own.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor

from megatron_async.engine.hf_config import HFConfig
from megatron_async.errors import UserError

Head = Literal["lm", "value", "none"]
Index = tuple[tuple[int, int], ...]
"""Half-open range per dimension of a Hugging Face tensor."""


class WeightMismatch(UserError):
    """Names or shapes on the two sides do not fit; the message lists both."""


class Part(StrEnum):
    """Which part of the Megatron parameter a Hugging Face tensor is."""

    WHOLE = "whole"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    GATE = "gate"
    UP = "up"


@dataclass(frozen=True, slots=True)
class Row:
    """One Hugging Face tensor.

    Attributes:
        parameter: Megatron's name with global layer and expert numbers (the local spec's spelling).
        shard_axis: axis cut over tensor-parallel ranks (expert-tensor-parallel for experts); None: replicated.
    """

    hf_name: str
    shape: tuple[int, ...]
    parameter: str
    part: Part
    shard_axis: int | None
    is_expert: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of one Hugging Face tensor and the view of the local parameter that holds it."""

    row: Row
    index: Index
    view: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rectangle."""
        return tuple(stop - start for start, stop in self.index)

    def copy_from(self, rectangle: Tensor) -> None:
        """Write the parameter (converting the dtype)."""
        self.view.copy_(rectangle.reshape(self.view.shape))

    def read(self) -> Tensor:
        """The parameter's bits in the rectangle's shape (a copy where the view is not contiguous)."""
        return self.view.reshape(self.shape)


class NameTable:
    """All Hugging Face tensors of one architecture and where Megatron keeps them.

    head: what follows the body: the language model's output layer, a critic's value head, or nothing.
    """

    def __init__(self, config: HFConfig, head: Head = "lm") -> None:
        self.config = config
        self.head = head
        self.rows: tuple[Row, ...] = tuple(_rows(config, head))
        self.by_name: dict[str, Row] = {row.hf_name: row for row in self.rows}
        self._by_parameter: dict[str, list[Row]] = {}
        for row in self.rows:
            self._by_parameter.setdefault(row.parameter, []).append(row)
        if config.tie_word_embeddings and head == "lm":
            # With pipeline parallelism the last stage keeps its own copy of the tied embedding.
            self._by_parameter["output_layer.weight"] = self._by_parameter["embedding.word_embeddings.weight"]

    def rows_of(self, parameter: str) -> list[Row]:
        """Rows that make up a Megatron parameter (global name).

        Raises:
            WeightMismatch: the table does not know the parameter.
        """
        if parameter not in self._by_parameter:
            raise WeightMismatch(
                f"Megatron parameter {parameter!r} has no Hugging Face tensor for {self.config.model_type}; the table "
                f"knows {', '.join(sorted(self._by_parameter)[:8])}, …"
            )
        return self._by_parameter[parameter]

    def pieces(self, parameter: str, tensor: Tensor, rank: int, size: int) -> list[Piece]:
        """Cut a local parameter into pieces.

        Args:
            parameter: Megatron's global name.
            tensor: the local parameter.
            rank, size: tensor-parallel (for experts: expert-tensor-parallel) rank and group size.

        Raises:
            WeightMismatch: unknown name, or a shape that is not this rank's share.
        """
        pieces = []
        for row in self.rows_of(parameter):
            index = _index(row, rank, size)
            view = self._view(row, tensor)
            if view.numel() != torch.Size([stop - start for start, stop in index]).numel():
                raise WeightMismatch(
                    f"shapes do not fit: Megatron {parameter} {tuple(tensor.shape)} on tensor rank {rank} of {size}, "
                    f"Hugging Face {row.hf_name} {row.shape} whose share is {list(index)}"
                )
            pieces.append(Piece(row, index, view))
        return pieces

    def _view(self, row: Row, tensor: Tensor) -> Tensor:
        if row.part is Part.WHOLE:
            return tensor
        if row.part in (Part.GATE, Part.UP):
            return tensor.chunk(2, 0)[row.part is Part.UP]
        queries = self.config.num_attention_heads // self.config.num_key_value_heads
        grouped = tensor.unflatten(0, (-1, queries + 2, self.config.head_dim))
        return {
            Part.QUERY: grouped[:, :queries],
            Part.KEY: grouped[:, queries],
            Part.VALUE: grouped[:, queries + 1],
        }[row.part]

    def check_names(self, on_disk: Iterable[str], where: str) -> None:
        """Compare the names of a checkpoint with the table's.

        Raises:
            WeightMismatch: listing what is missing and what is unexpected.
        """
        names = set(on_disk)
        if self.config.tie_word_embeddings or self.head != "lm":
            names.discard("lm_head.weight")
        missing = [row.hf_name for row in self.rows if row.hf_name not in names]
        unexpected = sorted(names - self.by_name.keys())
        if missing or unexpected:
            raise WeightMismatch(
                f"{where} does not hold the tensors of this configuration ({len(self.rows)} expected, {len(names)} "
                f"found)\n  expected but missing ({len(missing)}): {_some(missing)}\n  found but unexpected "
                f"({len(unexpected)}): {_some(unexpected)}\nCheck that config.json and the weights belong together."
            )


def _some(names: list[str], limit: int = 12) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "") if names else "none"


def _index(row: Row, rank: int, size: int) -> Index:
    index = [(0, n) for n in row.shape]
    if row.shard_axis is not None:
        share = row.shape[row.shard_axis] // size
        index[row.shard_axis] = (rank * share, (rank + 1) * share)
    return tuple(index)


def _rows(config: HFConfig, head: Head) -> Iterator[Row]:
    vocab, hidden = config.vocab_size, config.hidden_size
    embedding = "embedding.word_embeddings.weight"
    yield Row("model.embed_tokens.weight", (vocab, hidden), embedding, Part.WHOLE, 0)
    for layer in range(config.num_layers):
        yield from _attention_rows(config, layer)
        if config.moe_layers[layer]:
            yield from _moe_rows(config, layer)
        else:
            prefixes = (f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp")
            yield from _mlp_rows(*prefixes, hidden, config.intermediate_size, is_expert=False)
    yield Row("model.norm.weight", (hidden,), "decoder.final_layernorm.weight", Part.WHOLE, None)
    if head == "value":
        yield Row("score.weight", (1, hidden), "output_layer.weight", Part.WHOLE, None)
        yield Row("score.bias", (1,), "output_layer.bias", Part.WHOLE, None)
    elif head == "lm" and not config.tie_word_embeddings:
        yield Row("lm_head.weight", (vocab, hidden), "output_layer.weight", Part.WHOLE, 0)


def _attention_rows(config: HFConfig, layer: int) -> Iterator[Row]:
    hf, own = f"model.layers.{layer}", f"decoder.layers.{layer}"
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    qkv = f"{own}.self_attention.linear_qkv.weight"
    yield Row(f"{hf}.input_layernorm.weight", (hidden,), f"{own}.input_layernorm.weight", Part.WHOLE, None)
    yield Row(f"{hf}.self_attn.q_proj.weight", (queries, hidden), qkv, Part.QUERY, 0)
    yield Row(f"{hf}.self_attn.k_proj.weight", (keys, hidden), qkv, Part.KEY, 0)
    yield Row(f"{hf}.self_attn.v_proj.weight", (keys, hidden), qkv, Part.VALUE, 0)
    for side in ("q", "k"):
        norm = f"{own}.self_attention.{side}_layernorm.weight"
        yield Row(f"{hf}.self_attn.{side}_norm.weight", (head,), norm, Part.WHOLE, None)
    projection = f"{own}.self_attention.linear_proj.weight"
    yield Row(f"{hf}.self_attn.o_proj.weight", (hidden, queries), projection, Part.WHOLE, 1)
    norm = f"{own}.pre_mlp_layernorm.weight"
    yield Row(f"{hf}.post_attention_layernorm.weight", (hidden,), norm, Part.WHOLE, None)


def _moe_rows(config: HFConfig, layer: int) -> Iterator[Row]:
    hf, own = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    shape = (config.num_experts, config.hidden_size)
    yield Row(f"{hf}.gate.weight", shape, f"{own}.router.weight", Part.WHOLE, None)
    for expert in range(config.num_experts):
        prefixes = (f"{hf}.experts.{expert}", f"{own}.experts.{expert}")
        yield from _mlp_rows(*prefixes, config.hidden_size, config.moe_intermediate_size, is_expert=True)


def _mlp_rows(hf: str, own: str, hidden: int, ffn: int, *, is_expert: bool) -> Iterator[Row]:
    fc1, fc2 = f"{own}.linear_fc1.weight", f"{own}.linear_fc2.weight"
    yield Row(f"{hf}.gate_proj.weight", (ffn, hidden), fc1, Part.GATE, 0, is_expert)
    yield Row(f"{hf}.up_proj.weight", (ffn, hidden), fc1, Part.UP, 0, is_expert)
    yield Row(f"{hf}.down_proj.weight", (hidden, ffn), fc2, Part.WHOLE, 1, is_expert)


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_LOCAL_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_GROUPED_EXPERT = re.compile(r"experts\.(linear_fc[12])\.weight(\d+)$")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def global_name(name: str, layer_numbers: list[int], first_expert: int) -> str:
    """The table's spelling of a local parameter name.

    Args:
        name: as in ``GPTModel.named_parameters()``, of Megatron's local or Transformer Engine layers.
        layer_numbers: global index of each local layer.
        first_expert: global index of this rank's first expert.
    """
    match = _LAYER.match(name)
    if match is None:
        return name
    rest = _FUSED_NORMS.get(match[2], match[2])
    rest = _LOCAL_EXPERT.sub(lambda m: f"experts.{first_expert + int(m[1])}.{m[2]}.weight", rest)
    rest = _GROUPED_EXPERT.sub(lambda m: f"experts.{first_expert + int(m[2])}.{m[1]}.weight", rest)
    return f"decoder.layers.{layer_numbers[int(match[1])]}.{rest}"
