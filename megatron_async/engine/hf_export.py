"""Shards on all ranks → whole Hugging Face tensors on rank 0, a bounded bucket at a time.

Invariants:
- Collective: every rank iterates the whole generator; rank 0 alone gets tensors.
- At most one bucket of whole tensors exists at a time, and every rectangle is sent once, by its lowest owner.
- Bits are moved, never converted.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_async import training_record
from megatron_async.engine.gather import all_gather_json
from megatron_async.engine.hf_reader import INDEX_FILE, SINGLE_FILE
from megatron_async.engine.hf_weights import Index, NameTable, Piece, Row, WeightMismatch

DEFAULT_BUCKET_BYTES = 256 * 2**20
DEFAULT_SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Part:
    """One rectangle of a Hugging Face tensor and the rank that sends it."""

    row: Row
    index: Index
    owner: int

    @property
    def numel(self) -> int:
        """Elements in the rectangle."""
        return torch.Size([stop - start for start, stop in self.index]).numel()


class ExportPlan:
    """Who sends what, computed once per model (collective)."""

    def __init__(
        self, table: NameTable, pieces: list[Piece], bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        self._local = {(piece.row.hf_name, piece.index): piece for piece in pieces}
        self._dtype, self._device = pieces[0].view.dtype, pieces[0].view.device
        owners: dict[str, dict[Index, int]] = {}
        for rank, names in enumerate(all_gather_json(list(self._local))):
            for name, index in names:
                owners.setdefault(name, {}).setdefault(tuple((start, end) for start, end in index), rank)
        _check_coverage(table, owners)
        parts = [
            [Part(row, index, rank) for index, rank in owners[row.hf_name].items()] for row in table.rows
        ]
        self.buckets = _buckets(parts, bucket_bytes // self._dtype.itemsize)

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield every tensor in the table's order: (name, tensor) on rank 0, (name, None) elsewhere."""
        for bucket in self.buckets:
            rectangles = self._exchange([part for parts in bucket for part in parts])
            for parts in bucket:
                yield parts[0].row.hf_name, self._assemble(parts, rectangles)

    def _exchange(self, parts: list[Part]) -> dict[tuple[str, Index], Tensor]:
        """Send this rank's rectangles of a bucket to rank 0; there, return all of them."""
        by_owner: dict[int, list[Part]] = {}
        for part in parts:
            by_owner.setdefault(part.owner, []).append(part)
        rank = dist.get_rank()
        if rank != 0:
            if rank in by_owner:
                dist.send(torch.cat([self._read(part).flatten() for part in by_owner[rank]]), dst=0)
            return {}
        received = {}
        for owner, owned in by_owner.items():
            if owner == 0:
                received.update({(part.row.hf_name, part.index): self._read(part) for part in owned})
                continue
            sizes = [part.numel for part in owned]
            flat = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
            dist.recv(flat, src=owner)
            for part, values in zip(owned, flat.split(sizes), strict=True):
                shape = [stop - start for start, stop in part.index]
                received[part.row.hf_name, part.index] = values.view(shape)
        return received

    def _read(self, part: Part) -> Tensor:
        return self._local[part.row.hf_name, part.index].read()

    def _assemble(self, parts: list[Part], rectangles: dict[tuple[str, Index], Tensor]) -> Tensor | None:
        if dist.get_rank() != 0:
            return None
        row = parts[0].row
        whole = torch.empty(row.shape, dtype=self._dtype, device=self._device)
        for part in parts:
            whole[tuple(slice(*bounds) for bounds in part.index)] = rectangles[row.hf_name, part.index]
        return whole


def _check_coverage(table: NameTable, owners: dict[str, dict[Index, int]]) -> None:
    for row in table.rows:
        rectangles = owners.get(row.hf_name, {})
        covered = sum(torch.Size([stop - start for start, stop in index]).numel() for index in rectangles)
        if covered != row.numel:
            raise WeightMismatch(
                f"the ranks' shards hold {covered} of the {row.numel} elements of {row.hf_name}: {sorted(rectangles)}"
            )


def _buckets(tensors: list[list[Part]], limit: int) -> list[list[list[Part]]]:
    """Consecutive tensors grouped up to ``limit`` elements (a larger tensor is a bucket of its own)."""
    buckets: list[list[list[Part]]] = []
    filled = 0
    for parts in tensors:
        if not buckets or filled + parts[0].row.numel > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(parts)
        filled += parts[0].row.numel
    return buckets


class CheckpointWriter:
    """Writes a Hugging Face checkpoint on one rank, and puts it in place only when it is complete.

    The directory of an earlier checkpoint at the same path is replaced.
    """

    def __init__(
        self, path: Path, source: Path, dtype: torch.dtype, shard_bytes: int = DEFAULT_SHARD_BYTES
    ) -> None:
        self.path, self._source, self._dtype, self._limit = path, source, dtype, shard_bytes
        self._partial = path.with_name(path.name + ".partial")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor; a full shard is written to disk."""
        size = tensor.numel() * tensor.itemsize
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending[name] = tensor.cpu()
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        file = self._partial / f"shard-{len(self._shards)}"
        save_file(self._pending, file, metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> None:
        """Write what is left, the index, the configuration and the tokenizer, and move everything into place."""
        self._flush()
        count = len(self._shards)
        weight_map = {}
        for i, names in enumerate(self._shards):
            file = SINGLE_FILE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self._partial / f"shard-{i}").rename(self._partial / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._partial / INDEX_FILE).write_text(json.dumps(index, indent=2))
        self._copy_companions()
        for file in set(weight_map.values()):  # safetensors makes files that only their owner can read
            shutil.copymode(self._partial / "config.json", self._partial / file)
        replaced = self.path.with_name(self.path.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if self.path.exists():
            self.path.rename(replaced)
        self._partial.rename(self.path)
        shutil.rmtree(replaced, ignore_errors=True)

    def _copy_companions(self) -> None:
        """Configuration (with the dtype that was written), tokenizer, templates: all but weights, and what those were
        trained on, since these were trained further."""
        for file in sorted(self._source.iterdir()):
            is_weights = (
                file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name == INDEX_FILE
            )
            if file.is_file() and not is_weights and file.name not in ("config.json", training_record.FILE):
                shutil.copy2(file, self._partial / file.name)
        config = json.loads((self._source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(self._dtype).removeprefix("torch.")
        (self._partial / "config.json").write_text(json.dumps(config, indent=2))
