"""Binds an objective to the engine: packed arrays become a TokenBatch, global counts its denominators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from megatron_async.engine.policy import Policy, TrainStepResult
from megatron_async.engine.sequences import Packed, Sequence
from megatron_async.objectives import (
    BatchState,
    ContextParallel,
    EmptyBatch,
    Normaliser,
    Objective,
    TokenBatch,
)
from megatron_async.old_logits import AnchorLogprobs
from megatron_async.training.batch import with_arrays

LossFunction = Callable[[Packed, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


def global_counts(sequences: SequenceOf[Sequence]) -> Normaliser:
    """Action tokens and sequences of the global batch; every rank holds the whole batch, so no collective."""
    tokens = int(sum(sequence.arrays["action_mask"].sum() for sequence in sequences))
    return Normaliser(tokens=tokens, sequences=len(sequences))


def token_batch(
    arrays: Mapping[str, Tensor],
    sequence_ids: Tensor,
    logprobs: Tensor,
    context: ContextParallel | None = None,
) -> TokenBatch:
    """The objective's view of packed tokens. Without `anchor_logprobs` the objective takes the forward's own.

    logprobs: [T], of the starting weights; the anchor of tokens marked `anchor_is_current`. context: see
    `shared_sequences`.
    """
    anchor, is_current = arrays.get("anchor_logprobs"), arrays.get("anchor_is_current")
    if anchor is not None and is_current is not None:
        anchor = torch.where(is_current.bool(), logprobs.detach().float(), anchor)
    return TokenBatch(
        rollout_logprobs=arrays["rollout_logprobs"],
        anchor_logprobs=anchor,
        anchor_exact=arrays.get("anchor_exact"),
        advantages=arrays["advantages"],
        action_mask=arrays["action_mask"].bool(),
        sequence_ids=sequence_ids,
        version_gap=arrays["update_gap"],
        reference_logprobs=arrays.get("reference_logprobs"),
        rewards=arrays["rewards"],
        age_seconds=arrays.get("age_seconds"),
        context=context,
    )


def shared_sequences(
    policy: Policy, objective: Objective, sequences: SequenceOf[Sequence]
) -> ContextParallel | None:
    """How the objective sums over sequences of which each context-parallel rank holds a share; None: no need to."""
    if policy.layout.context_parallel_size == 1 or "whole_sequences" not in objective.needs:
        return None
    return ContextParallel(len(sequences), policy.sum_over_context)


def batch_state(
    objective: Objective, sequences: SequenceOf[Sequence], start_logprobs: SequenceOf[np.ndarray]
) -> BatchState:
    """Statistics of the global batch that the objective needs before its loss.

    start_logprobs: float32 [L] per sequence under the weights at the start of the update. Every rank holds the whole
    batch, so nothing is gathered. Raises EmptyBatch when no token may enter the loss.
    """
    names = sequences[0].arrays.keys()
    arrays = {name: torch.from_numpy(np.concatenate([s.arrays[name] for s in sequences])) for name in names}
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    sequence_ids = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    start = torch.from_numpy(np.concatenate(list(start_logprobs)))
    return objective.prepare(token_batch(arrays, sequence_ids, start), start, gather=lambda values: values)


def policy_loss(
    objective: Objective,
    normaliser: Normaliser,
    state: BatchState | None = None,
    context: ContextParallel | None = None,
) -> LossFunction:
    """The engine's loss function for one batch; the loss is already divided by the global denominator.

    context: of `shared_sequences`, for the sequences that the step is given.
    """

    def loss(packed: Packed, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        batch = token_batch(packed.arrays, packed.sequence_ids, logprobs, context)
        output = objective.loss(logprobs, batch, normaliser, entropy=entropy, state=state)
        return output.loss, {
            **output.stats,
            "entropy": torch.where(batch.action_mask, entropy.detach(), 0.0).sum(),
        }

    return loss


def train_in_parts(
    policy: Policy, objective: Objective, sequences: list[Sequence], anchors: AnchorLogprobs, parts: int
) -> list[TrainStepResult]:
    """One optimiser step on each of `parts` disjoint parts of the batch; none for a batch without sequences.

    Each part is the global batch of its step: its own denominators, and its own statistics where the objective needs
    them. A part that the objective rejects as a whole makes no step, and its result says so.
    """
    whole = with_arrays(sequences, anchors)
    needs_state = "batch_statistics" in objective.needs
    start = anchors.required_start() if needs_state and whole else []
    results = []
    for first in range(parts):
        part = whole[first::parts]
        if not part:
            continue
        try:
            state = batch_state(objective, part, start[first::parts]) if needs_state else None
        except EmptyBatch as empty:
            results.append(_no_step(empty))
            continue
        context = shared_sequences(policy, objective, part)
        loss = policy_loss(objective, global_counts(part), state, context)
        results.append(policy.train_step(part, loss))
    return results


def _no_step(empty: EmptyBatch) -> TrainStepResult:
    stats = {name: value.double().numpy() for name, value in empty.stats.items()} | {"entropy": np.zeros(())}
    return TrainStepResult(0.0, 0.0, 0.0, stats, (), {}, skipped=str(empty), micro_batches=0, fill=0.0)


def supervised_loss(actions: int, context: int, context_weight: float) -> LossFunction:
    """Cross-entropy on demonstrated actions, plus `context_weight` times that on the context.

    actions, context: counts in the global batch (denominators).
    """

    def loss(packed: Packed, logprobs: Tensor, _entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        on_actions = _masked_mean(-logprobs, packed.arrays["action_mask"], actions)
        on_context = _masked_mean(-logprobs, packed.arrays["context_mask"], context)
        stats = {"action_loss": on_actions.detach(), "context_loss": on_context.detach()}
        return on_actions + context_weight * on_context, stats

    return loss


def _masked_mean(values: Tensor, mask: Tensor, count: int) -> Tensor:
    return torch.where(mask.bool(), values, 0.0).sum() / max(count, 1)
