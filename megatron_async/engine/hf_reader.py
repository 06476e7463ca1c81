"""Reads slices of a Hugging Face checkpoint: a rank touches only the bytes of its own shard.

Invariants:
- No tensor is read whole unless the rank owns it whole.
- Names and shapes are compared with the table before the first byte is copied.
- Per-expert tensors (as Qwen3-MoE is published) and transformers' fused 3-D experts read the same.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_async.engine.hf_weights import Index, NameTable, Piece, WeightMismatch
from megatron_async.errors import UserError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class CheckpointMissing(UserError):
    """There are no weights where the configuration points, or only some of them."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a (possibly virtual) tensor lies: a stored tensor, an expert of it, and a row offset inside that."""

    stored: str
    expert: int | None
    row_offset: int
    shape: tuple[int, ...]


class CheckpointReader:
    """Random access to the tensors of a checkpoint directory.

    Raises:
        CheckpointMissing: no safetensors weights, or a shard that the index names is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = _locate(self.path)
        self._handles: dict[str, Any] = {}
        self._sources: dict[str, _Source] = {}
        for name in self._files:
            self._add(name)

    def names(self) -> Iterable[str]:
        """Names of all tensors, fused experts under their per-expert names."""
        return self._sources.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor."""
        return self._sources[name].shape

    def read(self, name: str, index: Index) -> Tensor:
        """Copy one rectangle of a tensor."""
        source = self._sources[name]
        (start, stop), *rest = index
        rows = slice(start + source.row_offset, stop + source.row_offset)
        others = tuple(slice(*bounds) for bounds in rest)
        stored = self._slice(source.stored)
        if source.expert is None:
            return stored[(rows, *others)]
        return stored[(slice(source.expert, source.expert + 1), rows, *others)][0]

    def _slice(self, stored: str) -> Any:
        file = self._files[stored]
        if file not in self._handles:
            self._handles[file] = safe_open(self.path / file, framework="pt")
        return self._handles[file].get_slice(stored)

    def _add(self, stored: str) -> None:
        shape = tuple(self._slice(stored).get_shape())
        prefix, _, last = stored.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or not prefix.endswith(".experts"):
            self._sources[stored] = _Source(stored, None, 0, shape)
            return
        experts, rows, columns = shape
        for expert in range(experts):
            name = f"{prefix}.{expert}"
            if last == "down_proj":
                self._sources[f"{name}.down_proj.weight"] = _Source(stored, expert, 0, (rows, columns))
                continue
            half = rows // 2
            self._sources[f"{name}.gate_proj.weight"] = _Source(stored, expert, 0, (half, columns))
            self._sources[f"{name}.up_proj.weight"] = _Source(stored, expert, half, (half, columns))


def _locate(path: Path) -> dict[str, str]:
    """Stored tensor name → file name."""
    if (path / INDEX_FILE).is_file():
        files: dict[str, str] = json.loads((path / INDEX_FILE).read_text())["weight_map"]
        missing = sorted({name for name in files.values() if not (path / name).is_file()})
        if missing:
            raise CheckpointMissing(
                f"{path / INDEX_FILE} names {len(missing)} weight file(s) that are not there: "
                f"{', '.join(missing[:5])}; download the checkpoint again"
            )
        return files
    if not (path / SINGLE_FILE).is_file():
        raise CheckpointMissing(
            f"{path.absolute()} holds neither {SINGLE_FILE} nor {INDEX_FILE}; check model.path"
        )
    with safe_open(path / SINGLE_FILE, framework="pt") as handle:
        return dict.fromkeys(handle.keys(), SINGLE_FILE)


@torch.no_grad()
def load_pieces(path: str | Path, table: NameTable, pieces: Iterable[Piece]) -> None:
    """Copy a checkpoint into this rank's parameters.

    Raises:
        CheckpointMissing: weight files missing.
        WeightMismatch: names or shapes that do not fit the table; nothing has been copied then.
    """
    reader = CheckpointReader(path)
    table.check_names(reader.names(), str(path))
    wrong = [row for row in table.rows if reader.shape(row.hf_name) != row.shape]
    if wrong:
        listed = "\n".join(
            f"  {row.hf_name}: config {row.shape}, file {reader.shape(row.hf_name)}" for row in wrong[:12]
        )
        raise WeightMismatch(
            f"{len(wrong)} tensor(s) of {path} do not have the shape that config.json implies:\n{listed}"
        )
    for piece in pieces:
        piece.copy_from(reader.read(piece.row.hf_name, piece.index))
