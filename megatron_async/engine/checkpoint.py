"""Sharded checkpoints of a model under any layout: Megatron's dist-checkpointing (torch_dist), in the background.

Invariants:
- What is stored is in the model's own shapes (``fully_reshardable``), so it loads under another tensor, pipeline,
  expert or data parallel size; optimiser states carry one key per parameter, whatever inner optimisers held them.
- Loading gives weights, masters, moments and step counts bit for bit; every parameter has a step count of its own.
- ``begin`` returns once everything is copied: training goes on, and what it changes does not reach the files.
- Files count only once the callback of ``begin`` has run; until then the folder is a leftover.
"""

import functools
import queue
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories, nested_values
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_async.engine import platform
from megatron_async.engine.checkpoint_files import BackgroundWrite, HostCopies
from megatron_async.engine.token_model import TokenModel
from megatron_async.errors import UserError

KINDS = ("param", "exp_avg", "exp_avg_sq")
"""What the optimiser keeps per parameter: the fp32 master, Adam's first and second moment."""

_AVERAGE = "average"

Moments = dict[str, Tensor]
"""One tensor per kind, of the parameter's shape."""


class CheckpointError(UserError):
    """A checkpoint that cannot be loaded into this model."""


def fingerprint(model: TokenModel) -> dict[str, Any]:
    """What must be equal where a checkpoint is loaded: the architecture and the weights' precision (JSON)."""
    architecture = {
        key: value for key, value in asdict(model.hf_config).items() if not isinstance(value, Path)
    }
    return {"architecture": architecture, "dtype": model.model_config.dtype}


def check_fingerprint(model: TokenModel, saved: Mapping[str, Any], where: Path) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        CheckpointError: naming the fields that differ.
    """
    own = fingerprint(model)
    pairs = {"dtype": (saved["dtype"], own["dtype"])}
    for name, value in own["architecture"].items():
        value = list(value) if isinstance(value, tuple) else value
        pairs[name] = (saved["architecture"].get(name), value)
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if differing:
        listed = "; ".join(f"{name}: checkpoint {a}, model {b}" for name, (a, b) in differing.items())
        raise CheckpointError(
            f"{where} holds another model ({listed}). Point model.path to the one it was made of"
        )


class ShardedWriter:
    """Writes one checkpoint of one model at a time; several writers may be at work at once.

    asynchronous: training goes on once everything is copied; the copies' memory, as much as the files of this rank, is
    kept for the next save.
    """

    def __init__(self, *, asynchronous: bool = True) -> None:
        self._asynchronous = asynchronous
        self._copies = HostCopies()
        # Megatron's own queue is shared by all writers of the process, which would take each other's results.
        self._results: queue.Queue[Any] = queue.Queue()
        self._strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
        self._validated = False
        self._write: BackgroundWrite | None = None

    @property
    def pending(self) -> bool:
        """Whether a write has not been finished yet."""
        return self._write is not None

    def prepare(self, model: TokenModel, average: list[Tensor] | None = None) -> None:
        """Allocate the copies, which the first save would otherwise wait for; collective. Changes nothing."""
        if self._asynchronous:
            self._saved_state(model, average)

    def begin(
        self,
        model: TokenModel,
        folder: Path,
        written: Callable[[], None],
        average: list[Tensor] | None = None,
    ) -> None:
        """Write everything of ``model`` into ``folder`` (made here, must not exist); collective.

        Args:
            written: called on every rank once all ranks' files are complete.
            average: a second set of fp32 weights, in the order and shapes of ``model.masters()``.
        """
        self.finish()
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        state = self._saved_state(model, average)
        filesystem_async._results_queue = self._results
        # What lies where does not change while the model lives: once is enough to prove that nothing overlaps.
        request = dist_checkpointing.save(
            state,
            str(folder),
            self._strategy,
            validate_access_integrity=not self._validated,
            async_sharded_save=True,
        )
        self._validated = True
        request.add_finalize_fn(written)
        self._write = BackgroundWrite(request, self._results)
        if not self._asynchronous:
            self.finish()

    def poll(self) -> None:
        """Finish a write whose files are complete on all ranks; returns at once otherwise. Collective."""
        if self._write is not None and self._write.is_done():
            self.finish()

    def finish(self) -> None:
        """Wait for the write in progress. Collective; raises what went wrong while writing."""
        write, self._write = self._write, None
        if write is not None:
            write.finish()

    def abandon(self) -> None:
        """Give up a write in progress, as when the run ends with an error; not collective."""
        self._write = None

    def _saved_state(self, model: TokenModel, average: list[Tensor] | None) -> dict[str, Any]:
        """Everything that is written; live tensors where training waits anyway."""
        model_state = _model_state(model)
        state: dict[str, Any] = {"model": model_state, "random": _random_state()}
        if model.optimizer is not None:
            initialise_states(model)
            kinds = dict(zip(KINDS, KINDS, strict=True))
            copies = self._copies if self._asynchronous else None
            state["optimizer"] = _optimizer_state(model, model_state, kinds, copies)
            if average is not None:
                with _contents_exchanged(model.masters(), average):
                    names = {"param": _AVERAGE}
                    state["average"] = _optimizer_state(model, model_state, names, self._copies)
        if self._asynchronous:
            self._copies.take(model_state)
        platform.setup().synchronize()
        return state


def load(model: TokenModel, folder: Path, *, num_steps: int, with_random_state: bool = False) -> None:
    """Put a checkpoint into ``model``, whatever layout wrote it; collective.

    Args:
        num_steps: optimiser steps made when it was written; what the schedule goes on from.
        with_random_state: also restore the generators; only where ranks and layout are those that wrote it.
    """
    state: dict[str, Any] = {"model": _model_state(model)}
    order = _parameters(state["model"])
    if model.optimizer is not None:
        initialise_states(model)
        state["optimizer"] = _templates(state["model"], KINDS)
    if with_random_state:
        state["random"] = _random_state()
    loaded = dist_checkpointing.load(state, str(folder))
    for index, chunk in enumerate(model.models):
        chunk.load_state_dict(loaded["model"][index])
    if model.optimizer is not None:
        _load_optimizer(
            model, {order[i]: held for i, held in loaded["optimizer"].items()}, num_steps
        )
    if with_random_state:
        _set_random_state(loaded["random"])


def load_weights(model: TokenModel, folder: Path) -> None:
    """Put a checkpoint's weights alone into ``model``; collective. A present optimiser takes them as its masters."""
    loaded = dist_checkpointing.load({"model": _model_state(model)}, str(folder))
    for index, chunk in enumerate(model.models):
        chunk.load_state_dict(loaded["model"][index])
    if model.optimizer is not None:
        model.optimizer.reload_weights()


@torch.no_grad()
def load_average(model: TokenModel, folder: Path, average: list[Tensor]) -> None:
    """Overwrite ``average`` (order and shapes of ``model.masters()``) with what ``begin`` was given; collective."""
    model_state = _model_state(model)
    order = _parameters(model_state)
    loaded = dist_checkpointing.load({"average": _templates(model_state, (_AVERAGE,))}, str(folder))[
        "average"
    ]
    whole = {order[i]: held[_AVERAGE] for i, held in loaded.items()}
    for value, parameter, part in zip(average, *_master_order(model), strict=True):
        value.copy_(whole[parameter].flatten()[part].view_as(value))


# ---- weights ---------------------------------------------------------------------------------------------------------


def _metadata() -> dict[str, Any]:
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        # Otherwise keys depend on how many inner optimisers there are, and so on the layout.
        "chained_optim_avoid_prefix": True,
    }


def _model_state(model: TokenModel) -> dict[int, Any]:
    return {i: chunk.sharded_state_dict(metadata=_metadata()) for i, chunk in enumerate(model.models)}


def _sharded(model_state: dict[int, Any]) -> Iterator[ShardedBase]:
    """Descriptions of this rank's parameters; ``data`` is the live parameter."""
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    yield from (entry for entry in nested_values(tensors) if isinstance(entry.data, torch.nn.Parameter))


def _parameters(model_state: dict[int, Any]) -> list[Tensor]:
    return [entry.data for entry in _sharded(model_state)]


def _described(entry: ShardedBase, kind: str, data: Tensor) -> ShardedBase:
    """A tensor that lies over the ranks as a parameter does, under a key of its own."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{kind}.{entry.key}", "data": data}
    if hasattr(entry, "dtype"):
        changes["dtype"] = data.dtype
    return replace(entry, **changes)


def _templates(model_state: dict[int, Any], kinds: tuple[str, ...]) -> dict[int, dict[str, ShardedBase]]:
    """Where to load per-parameter fp32 tensors, by place in ``_parameters``; frozen parameters have none."""
    return {
        i: {
            kind: _described(entry, kind, torch.empty_like(entry.data, dtype=torch.float32)) for kind in kinds
        }
        for i, entry in enumerate(_sharded(model_state))
        if entry.data.requires_grad
    }


# ---- optimiser -------------------------------------------------------------------------------------------------------


def _optimizer_state(
    model: TokenModel, model_state: dict[int, Any], keys: dict[str, str], copies: HostCopies | None
) -> dict[int, Any]:
    """Per inner optimiser and parameter, the kinds in ``keys`` under the names they map to.

    copies: where to copy live states that are whole on this rank; None leaves them in place. What Megatron gathers
    over data-parallel ranks is a copy already.
    """
    state: dict[int, Any] = {}
    entries = {entry.data: entry for entry in _sharded(model_state)}
    for index, inner in enumerate(_inner(model)):
        if not isinstance(inner, DistributedOptimizer) or inner.data_parallel_group.size() == 1:
            state[index] = [
                {
                    kind: _described(entries[p], name, held[kind].detach().view(p.shape))
                    for kind, name in keys.items()
                }
                for p, _, held in _live_states_of(inner)
            ]
            if copies is not None:
                copies.take(state[index])
            continue
        # Megatron gathers the shards over data parallel ranks and gives them the parameters' shapes.
        tensors = inner.sharded_param_state_fully_reshardable(model_state, False, _metadata())
        state[index] = [
            {
                name: replace(held[kind], key=held[kind].key.replace(f".{kind}.", f".{name}.", 1))
                for kind, name in keys.items()
            }
            for held in tensors.values()
        ]
    return state


def _inner(model: TokenModel) -> list[Any]:
    assert model.optimizer is not None, "only models with an optimiser get here"
    return model.optimizer.inner_optimizers()


def _plain_states(inner: Any) -> Iterator[tuple[Tensor, Moments]]:
    """Parameter and live states of an optimiser that is not distributed."""
    pairs = [(p, p) for p in inner.get_parameters()]
    if hasattr(inner, "float16_groups"):
        halves = [p for group in inner.float16_groups for p in group]
        masters = [p for group in inner.fp32_from_float16_groups for p in group]
        singles = [p for group in inner.fp32_from_fp32_groups for p in group]
        pairs = [*zip(halves, masters, strict=True), *zip(singles, singles, strict=True)]
    for parameter, master in pairs:
        yield parameter, {"param": master, **inner.optimizer.state[master]}


def _distributed_states(inner: DistributedOptimizer) -> Iterator[tuple[Tensor, slice, Moments]]:
    """Parameter, this rank's range of its flattened form, and live states of that range."""
    for parameter in inner.model_param_group_index_map:
        held = inner._get_model_param_range_map(parameter)["param"]
        yield parameter, slice(held.start, held.end), inner._get_main_param_and_optimizer_states(parameter)


def _live_states_of(inner: Any) -> Iterator[tuple[Tensor, slice, Moments]]:
    if isinstance(inner, DistributedOptimizer):
        yield from _distributed_states(inner)
    else:
        yield from ((parameter, slice(None), held) for parameter, held in _plain_states(inner))


def _live_states(model: TokenModel) -> Iterator[tuple[Tensor, slice, Moments]]:
    for inner in _inner(model):
        yield from _live_states_of(inner)


@torch.no_grad()
def _load_optimizer(model: TokenModel, loaded: dict[Tensor, Moments], num_steps: int) -> None:
    for parameter, part, held in _live_states(model):
        for kind in KINDS:
            held[kind].copy_(loaded[parameter][kind].flatten()[part].view_as(held[kind]))
    assert model.optimizer is not None
    model.optimizer.resume_at(num_steps)


def _master_order(model: TokenModel) -> tuple[list[Tensor], list[slice]]:
    """For every tensor of ``model.masters()``: its parameter, and the range of it that it is."""
    by_master = {id(held["param"]): (parameter, part) for parameter, part, held in _live_states(model)}
    found = [by_master[id(master)] for master in model.masters()]
    return [parameter for parameter, _ in found], [part for _, part in found]


def initialise_states(model: TokenModel) -> None:
    """Make the moments of an optimiser that has not stepped yet exist, all zero; weights and counts stay.

    Raises:
        CheckpointError: an optimiser whose states do not lie whole in fp32 beside the masters.
    """
    assert model.optimizer is not None
    settings = model.optimizer.megatron_config
    if settings.optimizer_cpu_offload or settings.use_precision_aware_optimizer:
        raise CheckpointError(
            "optimiser states that are offloaded to the host or kept in fewer bits cannot be put back from a "
            "checkpoint; set checkpoint.every to 0, or remove trainer.megatron.optimizer.optimizer_cpu_offload and "
            "use_precision_aware_optimizer"
        )
    for inner in _inner(model):
        if len(inner.optimizer.state) > 0:
            continue
        masters = [p for group in inner.optimizer.param_groups for p in group["params"]]
        kept = [master.detach().clone() for master in masters]
        for master in masters:
            master.grad = torch.zeros_like(master)
        inner.optimizer.step()
        inner.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for master, before in zip(masters, kept, strict=True):
                master.copy_(before)
    model.optimizer.resume_at(model.optimizer.num_steps)


@contextmanager
def _contents_exchanged(ours: list[Tensor], theirs: list[Tensor]) -> Iterator[None]:
    """Within the block each of ``ours`` holds the bits of its counterpart, and the other way round."""
    swap = functools.partial(_swap_all, ours, theirs)
    swap()
    try:
        yield
    finally:
        swap()


@torch.no_grad()
def _swap_all(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        kept = own.detach().clone()
        own.copy_(other)
        other.copy_(kept)


# ---- random state ----------------------------------------------------------------------------------------------------


def _random_state() -> ShardedObject:
    """All generators of this rank. Ranks of another layout have no use for it."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if platform.setup().is_gpu:
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
