"""What policy and critic share: a Megatron model under any layout that scores tokens, learns and exports its weights.

Invariants:
- ``loss_fn`` returns its micro-batch's part of the *globally normalised* loss; parts are summed over micro-batches and
  ranks and divided by nothing. So loss and gradients do not depend on how the batch was cut.
- Every rank passes the same sequences in the same order and gets the same results; all methods are collective.
- A batch without an active token, a non-finite gradient or a gradient of exactly zero makes no step, and says so.
- After ``load_hf`` the optimiser's masters equal the loaded weights; ``export`` gives the exact bits of the parameters.
"""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor

from megatron_async.config.schema import LayoutConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megatron_async.engine import platform
from megatron_async.engine.hf_config import HFConfig
from megatron_async.engine.hf_export import CheckpointWriter, ExportPlan
from megatron_async.engine.hf_reader import load_pieces
from megatron_async.engine.hf_weights import NameTable, Piece, global_name
from megatron_async.engine.model import DTYPES, build_chunks, transformer_config
from megatron_async.engine.new_weights import have_masters
from megatron_async.engine.optimizer import Optimizer, wrap_ddp
from megatron_async.engine.options import token_multiple
from megatron_async.engine.packing import PackingPlan, pack
from megatron_async.engine.passes import LossFn, PassResult, Readout, run_pass
from megatron_async.engine.routing_replay import RoutingReplay
from megatron_async.engine.sequences import BatchIndex, Cut, MicroBatch, Sequence, build_micro_batch
from megatron_async.errors import UserError

TokenValues = list[NDArray[np.float32]]
"""One float32 [L] per sequence, token-aligned."""
COLLECTIVE_GRACE_S = 300.0
"""Collectives outlast the trainer's own deadline by this much, so that the deadline's message comes first."""


class TokenError(UserError):
    """A token id that the vocabulary does not have."""


@dataclass(frozen=True, slots=True)
class TrainStepResult:
    """What one training step did; equal on all ranks.

    Attributes:
        loss: the globally normalised loss.
        grad_norm: global gradient norm before clipping.
        lr: learning rate used.
        stats: what ``loss_fn`` reported (any shapes), summed over the global batch.
        values: what the readout gave under the weights before the step, one list over the sequences for each kind.
        seconds: wall time by stage (pack, forward_backward, optimizer, gather).
        skipped: why no optimiser step was made, or None.
        micro_batches: per rank.
        fill: tokens over the micro-batches' capacity.
    """

    loss: float
    grad_norm: float
    lr: float
    stats: dict[str, NDArray[np.float64]]
    values: tuple[TokenValues, ...]
    seconds: dict[str, float]
    skipped: str | None
    micro_batches: int
    fill: float

    @property
    def logprobs(self) -> TokenValues:
        """A policy's log-probs: float32 [L] per sequence, 0 at position 0."""
        return self.values[0]


@dataclass(slots=True)
class _Stopwatch:
    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        platform.setup().synchronize()
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now


class TokenModel:
    """Build with ``build``. Without an optimiser it scores and exports only.

    A subclass says which tensors the model has (`name_table`), what its output says of each token (`_readout`, `_kinds`
    values) and may change the chunks before they are wrapped for training (`_prepare`).
    """

    _kinds = 1

    def __init__(
        self,
        hf: HFConfig,
        config: TransformerConfig,
        chunks: list[GPTModel],
        optimizer: OptimizerConfig | None,
        *,
        model_config: ModelConfig,
        layout: LayoutConfig,
        trainer: TrainerConfig,
    ) -> None:
        self.hf_config = hf
        self.transformer_config = config
        self.table = self.name_table(hf)
        self.model_config, self.layout, self.trainer = model_config, layout, trainer
        self.models = chunks
        self.chunks: list[Any] = list(chunks)
        self.optimizer: Optimizer | None = None
        self.routing = self._routing_replay()
        self._prepare()
        self._mark_shards()
        self.load_hf(model_config.path)
        if optimizer is not None:
            distributed = trainer.use_distributed_optimizer
            further = trainer.megatron
            self.chunks = list(wrap_ddp(config, chunks, distributed_optimizer=distributed, further=further))
            dtype = DTYPES[model_config.dtype]
            self.optimizer = Optimizer(
                optimizer, self.chunks, dtype=dtype, distributed=distributed, further=further
            )

    @classmethod
    def build(
        cls,
        model: ModelConfig,
        layout: LayoutConfig,
        trainer: TrainerConfig,
        optimizer: OptimizerConfig | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """Join the process group, build this rank's share of the model and load the checkpoint into it.

        Args:
            options: the subclass's own.

        Raises:
            PlatformError, LayoutError: the layout fits neither the ranks nor the model.
            OptionError: an option of megatron-core that cannot be set.
            UnsupportedModelError, CheckpointMissing, WeightMismatch: the checkpoint.
        """
        platform.init_distributed(layout, seed, deadline_s=trainer.deadline_s + COLLECTIVE_GRACE_S)
        hf = HFConfig.from_pretrained(model.path)
        config = transformer_config(hf, model, layout, trainer)
        chunks = cls.build_chunks(hf, config)
        return cls(
            hf, config, chunks, optimizer, model_config=model, layout=layout, trainer=trainer, **options
        )

    # ---- what a subclass says ------------------------------------------------------------------------------------

    @staticmethod
    def name_table(hf: HFConfig) -> NameTable:
        """The tensors of the model."""
        return NameTable(hf)

    @staticmethod
    def build_chunks(hf: HFConfig, config: TransformerConfig) -> list[GPTModel]:
        """This rank's model, one chunk per virtual pipeline stage; weights uninitialised."""
        return build_chunks(hf, config)

    def _prepare(self) -> None:
        """Change the chunks before their shards are marked and weights are loaded."""

    def _readout(self, output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """See ``passes.Readout``: values of a training pass."""
        raise NotImplementedError

    # ---- scoring and learning ------------------------------------------------------------------------------------

    def _score(self, sequences: list[Sequence], readout: Readout, kinds: int) -> list[TokenValues]:
        """The readout's values of every token under the present weights, no gradients."""
        batch, plan = self._plan(sequences, replays=self._replays_in(training=False))
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            result = self._run(batch, plan, None, readout)
        return [batch.split(kind) for kind in result.gather_tokens(kinds, batch.num_tokens, self._device)]

    def train_step(self, sequences: list[Sequence], loss_fn: LossFn) -> TrainStepResult:
        """One optimiser step on a global batch.

        Args:
            sequences: the whole global batch, equal on every rank.
            loss_fn: ``(packed, *values) → (loss, stats)`` with the model's token values, [T] each (a policy's log-probs
                and entropies, a critic's state values): the scalar part of the globally normalised loss that the
                micro-batch's tokens contribute, and detached tensors to be summed over the batch. It is not called for
                micro-batches without tokens; of one that context-parallel ranks share, all of them call it, a rank
                whose share is empty with T = 0, so that it may hold collectives over them.

        Raises:
            PackingError: a sequence longer than a micro-batch.
            TokenError: a token id outside the vocabulary.
            RuntimeError: built without an optimiser.
        """
        optimizer = self._required_optimizer()
        watch = _Stopwatch()
        batch, plan = self._plan(sequences, replays=self._replays_in(training=True))
        inactive = _without_active_tokens(batch)
        watch.lap("pack")
        for chunk in self.chunks:
            chunk.train()
        optimizer.zero_grad(self.chunks)
        result = self._run(batch, plan, _no_loss if inactive else loss_fn, self._readout)
        watch.lap("forward_backward")
        outcome = optimizer.step(skip=inactive)
        watch.lap("optimizer")
        gathered = result.gather_tokens(self._kinds, batch.num_tokens, self._device)
        loss, stats = result.gather_stats()
        watch.lap("gather")
        return TrainStepResult(
            loss=loss,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            stats=stats,
            values=tuple(batch.split(kind) for kind in gathered),
            seconds=watch.seconds,
            skipped=outcome.skipped,
            micro_batches=len(plan.micro_batches[0]),
            fill=plan.fill,
        )

    def sum_over_context(self, values: Tensor) -> Tensor:
        """Add `values` over the ranks that hold shares of the same sequences, in place; returns it (collective)."""
        torch.distributed.all_reduce(values, group=parallel_state.get_context_parallel_group())
        return values

    def _record_routing(self, sequences: list[Sequence]) -> list[NDArray[np.int32]]:
        """Experts that the routers choose by themselves, [L, MoE layers, top-k] per sequence on every rank; the last
        token's row is 0."""
        assert self.routing is not None, "a model that replays has routers"
        batch, plan = self._plan(sequences, replays=False)
        shape = (batch.num_tokens, sum(self.hf_config.moe_layers), self.hf_config.num_experts_per_tok)
        record = torch.zeros(shape, dtype=torch.int32, device=self._device)
        micro_batches = self._micro_batches(batch, plan)
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad(), self.routing.recording(micro_batches, record):
            run_pass(self.chunks, micro_batches, None, self._readout)
        torch.distributed.all_reduce(record)
        return batch.split(record.cpu().numpy())

    def _plan(self, sequences: list[Sequence], *, replays: bool) -> tuple[BatchIndex, PackingPlan]:
        cut = self._cut
        interleaved = self.layout.virtual_pipeline_model_parallel_size is not None
        plan = pack(
            [len(sequence) for sequence in sequences],
            budget=self.trainer.micro_batch_tokens * cut.context_parallel,
            ranks=parallel_state.get_data_parallel_world_size(),
            count_multiple=self.layout.pipeline_model_parallel_size if interleaved else 1,
            length_multiple=cut.length_multiple,
        )
        usable = self.routing.screened(sequences) if replays and self.routing is not None else sequences
        batch = BatchIndex(usable, routing=replays)
        if batch.token_ids.min() < 0 or batch.token_ids.max() >= self.hf_config.vocab_size:
            raise TokenError(
                f"token ids range from {batch.token_ids.min()} to {batch.token_ids.max()}, but the vocabulary has "
                f"{self.hf_config.vocab_size}; tokenizer and checkpoint do not belong together"
            )
        return batch, plan

    def _run(
        self, batch: BatchIndex, plan: PackingPlan, loss_fn: LossFn | None, readout: Readout
    ) -> PassResult:
        micro_batches = self._micro_batches(batch, plan)
        if self.routing is None or not batch.routing:
            return run_pass(self.chunks, micro_batches, loss_fn, readout)
        with self.routing.replaying(micro_batches):
            return run_pass(self.chunks, micro_batches, loss_fn, readout)

    def _micro_batches(self, batch: BatchIndex, plan: PackingPlan) -> list[MicroBatch]:
        members = plan.micro_batches[parallel_state.get_data_parallel_rank()]
        return [build_micro_batch(batch, chosen, self._cut) for chosen in members]

    def _routing_replay(self) -> RoutingReplay | None:
        """What replays recorded routing in this model, if any is to be replayed."""
        return None

    def _replays_in(self, *, training: bool) -> bool:
        """Whether a training pass (a scoring pass) chooses the experts on record."""
        return self.routing is not None

    @functools.cached_property
    def _cut(self) -> Cut:
        return Cut(
            tensor_parallel=self.layout.tensor_model_parallel_size,
            context_parallel=self.layout.context_parallel_size,
            context_rank=parallel_state.get_context_parallel_rank(),
            device=self._device,
            unit=token_multiple(self.trainer.megatron.transformer),
        )

    @property
    def _device(self) -> torch.device:
        return platform.setup().device

    # ---- weights -------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters under their global Megatron names (layer and expert numbers of the whole model)."""
        experts = self.hf_config.num_experts // self.layout.expert_model_parallel_size
        first_expert = parallel_state.get_expert_model_parallel_rank() * experts
        for model in self.models:
            layers = [layer.layer_number - 1 for layer in model.decoder.layers]
            for name, parameter in model.named_parameters():
                yield global_name(name, layers, first_expert), parameter

    def _mark_shards(self) -> None:
        """Tell Megatron how each parameter lies over the ranks, where it would not know by itself.

        - It marks tensor-parallel shards only while initialising weights, which building from a checkpoint skips; the
          gradient norm would count the first tensor-parallel rank's shards alone, and clip too late.
        - It reduces expert gradients over the expert-data-parallel ranks only if expert parallel is on; with tensor
          parallel and whole experts, the tensor-parallel ranks' tokens would be left out.
        """
        experts_lie_apart = (
            self.layout.expert_model_parallel_size > 1
            or self.layout.expert_tensor_parallel_size != self.layout.tensor_model_parallel_size
        )
        for name, parameter in self.named_parameters():
            row = self.table.rows_of(name)[0]
            marks: Any = parameter
            marks.tensor_model_parallel = row.shard_axis is not None
            marks.partition_dim = -1 if row.shard_axis is None else row.shard_axis
            marks.partition_stride = 1
            marks.allreduce = not (row.is_expert and experts_lie_apart)

    def pieces(self, value: Callable[[Tensor], Tensor] = Tensor.detach) -> list[Piece]:
        """Views of this rank's parameters as rectangles of Hugging Face tensors.

        Args:
            value: what to view of each parameter, of its shape (its gradient or a copy, for instance).
        """
        dense = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        expert = (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        pieces: list[Piece] = []
        for name, parameter in self.named_parameters():
            is_expert = self.table.rows_of(name)[0].is_expert
            pieces += self.table.pieces(name, value(parameter), *(expert if is_expert else dense))
        return pieces

    def load_hf(self, path: str | Path) -> None:
        """Overwrite the weights with a checkpoint's; the optimiser's masters follow, its moments stay.

        Raises:
            CheckpointMissing, WeightMismatch: nothing has been changed then.
        """
        load_pieces(path, self.table, self.pieces())
        if self.optimizer is not None:
            self.optimizer.reload_weights()

    def masters(self) -> list[Tensor]:
        """The optimiser's fp32 weights, live: this rank's shard, in an order that never changes."""
        return self._required_optimizer().masters()

    def exchange_masters(self, values: list[Tensor]) -> None:
        """Swap other fp32 weights with the masters and into the model; a second call takes it back bit for bit."""
        self._required_optimizer().exchange_masters(values)

    @property
    def has_masters(self) -> bool:
        """Whether a step moves fp32 masters first, and every weight follows them: what `observe_updates` needs."""
        return self.optimizer is not None and have_masters(self.models)

    def observe_updates(self, observer: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
        """Give every step's new weights, named as by `named_parameters`, to `observer` before they are in the model.

        Collective in every step that is made: the observer iterates to the end. It may write the bits into the model.
        """
        if not self.has_masters:
            raise RuntimeError("the weights have no fp32 masters of their own; a step writes them before it is seen")
        self._required_optimizer().observe(observer, self.named_parameters)

    def _required_optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise RuntimeError(
                f"this {type(self).__name__.lower()} was built without an optimiser; pass an OptimizerConfig to build"
            )
        return self.optimizer

    @functools.cached_property
    def _export_plan(self) -> ExportPlan:
        return ExportPlan(self.table, self.pieces())

    def export(self) -> Iterator[tuple[str, Tensor | None]]:
        """Stream all weights as (Hugging Face name, tensor): whole tensors on rank 0, None elsewhere.

        Collective: every rank must iterate to the end. Experts come one by one under their published names.
        """
        return self._export_plan.stream()

    def save_hf(self, path: str | Path) -> None:
        """Write a Hugging Face checkpoint (sharded safetensors, configuration, tokenizer) from rank 0; collective.

        The directory appears, or replaces an earlier one, only when it is complete.
        """
        writer: CheckpointWriter | None = None
        if torch.distributed.get_rank() == 0:
            writer = CheckpointWriter(
                Path(path), Path(self.model_config.path), DTYPES[self.model_config.dtype]
            )
        for name, tensor in self.export():
            if writer is not None and tensor is not None:
                writer.add(name, tensor)
        if writer is not None:
            writer.finish()
        torch.distributed.barrier()


def _without_active_tokens(batch: BatchIndex) -> str | None:
    """The reason to skip a batch whose ``action_mask`` (if it has one) is empty."""
    mask = batch.arrays.get("action_mask")
    if mask is None or mask.any():
        return None
    return f"none of the batch's {batch.num_tokens} tokens is an action token (action_mask is all false)"


def _no_loss(packed: Any, *values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return values[0].sum() * 0.0, {}
