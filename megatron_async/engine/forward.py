"""Log-probs and entropy of tokens over logits whose vocabulary is cut over tensor-parallel ranks.

Invariants:
- The logits are never gathered, and the forward pass does not overwrite them: per token, ranks exchange one maximum and
  three sums.
- All arithmetic is fp32 whatever the logits' precision; fp32 temporaries cover ``chunk`` tokens at a time.
- Temperature divides the logits, so values and gradients are those of the distribution that was sampled.

With x = logits / temperature, log Z = log Σ exp x and p = softmax x:
log p_t = x_t − log Z, H = log Z − Σ p x; ∂log p_t/∂x = 1_t − p, ∂H/∂x = −p (log p + H).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.engine import platform
from megatron_async.engine.sequences import MicroBatch


class _VocabParallelLogProbs(torch.autograd.Function):
    """(logits [S, V/tp], targets [S], 1/temperature [S]) → (log-probs [S], entropy [S]), fp32."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        inverse_temperature: Tensor,
        group: Any,
        entropy: bool,
        chunk: int,
        consume: bool,
    ) -> tuple[Tensor, Tensor]:
        first = dist.get_rank(group) * logits.shape[-1]
        local_targets = targets - first
        inside = (local_targets >= 0) & (local_targets < logits.shape[-1])
        local_targets = local_targets.clamp(0, logits.shape[-1] - 1)
        scale = inverse_temperature.float()
        maximum = logits.amax(-1).float() * scale
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        picked, local_log_z, local_mean = torch.zeros(3, len(targets), device=logits.device)
        for rows in _chunks(len(targets), chunk):
            shifted = _shifted(logits[rows], scale[rows], maximum[rows])
            picked[rows] = shifted.gather(-1, local_targets[rows, None])[:, 0]
            # The largest probability is 1 / Σ exp(x − max): the fused softmax gives the sum without another pass.
            p = shifted.softmax(-1)
            local_log_z[rows] = shifted.amax(-1) - p.amax(-1).log()
            if entropy:
                local_mean[rows] = torch.linalg.vecdot(p, shifted)
        share = local_log_z.exp()
        sums = torch.stack([share, picked.where(inside, 0.0), share * local_mean])
        dist.all_reduce(sums, group=group)
        log_z = sums[0].log()
        entropies = log_z - sums[2] / sums[0] if entropy else torch.zeros_like(log_z)
        share = (local_log_z - log_z).exp()
        ctx.save_for_backward(logits, local_targets, inside, scale, maximum + log_z, share, entropies)
        ctx.chunk, ctx.consume = chunk, consume
        ctx.set_materialize_grads(False)
        return sums[1] - log_z, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, local_targets, inside, scale, log_z, share, entropies = ctx.saved_tensors
        # None where the loss does not depend on the entropy (or on the log-probs) at all.
        logprob_gradient, entropy_gradient = (None if g is None else g.float() * scale for g in gradients)
        if logprob_gradient is None:
            logprob_gradient = torch.zeros_like(log_z)
        result = logits if ctx.consume else torch.empty_like(logits)
        for rows in _chunks(len(local_targets), ctx.chunk):
            log_p = _shifted(logits[rows], scale[rows], log_z[rows])
            gradient = log_p.softmax(-1)  # of this rank's slice; times its share, p
            if entropy_gradient is None:
                gradient.mul_((-logprob_gradient * share)[rows, None])
            else:
                weight = log_p.add_(entropies[rows, None]).mul_(entropy_gradient[rows, None])
                gradient.mul_(weight.add_(logprob_gradient[rows, None])).mul_(-share[rows, None])
            at_target = logprob_gradient[rows].where(inside[rows], 0.0)
            gradient.scatter_add_(-1, local_targets[rows, None], at_target[:, None])
            result[rows] = gradient
        return result, None, None, None, None, None, None


def _shifted(logits: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """logits · scale − offset per row, in fp32."""
    return (logits.float() * scale[:, None]).sub_(offset[:, None])


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    inverse_temperature: Tensor,
    group: dist.ProcessGroup,
    *,
    entropy: bool = True,
    chunk: int | None = None,
    consume: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, differentiable in the logits.

    Args:
        logits: [S, V/tp] this rank's slice of the vocabulary, any floating dtype.
        targets: int64 [S], global token ids.
        inverse_temperature: [S], 1 / sampling temperature.
        group: tensor-parallel group.
        entropy: False skips the entropy (zeros are returned).
        chunk: tokens whose fp32 temporaries exist at once (default: as many as suit the device and the vocabulary).
        consume: the backward pass writes the gradient over the logits, which saves their size in memory; for logits
            that nothing else reads afterwards.

    Returns:
        fp32 log-probs [S] and entropies [S], in nats; equal on all ranks of the group.
    """
    if chunk is None:
        chunk = max(1, platform.setup().scratch_elements // logits.shape[-1])
    return _VocabParallelLogProbs.apply(logits, targets, inverse_temperature, group, entropy, chunk, consume)


def token_logprobs(
    logits: Tensor, micro_batch: MicroBatch, group: dist.ProcessGroup, *, entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Token-aligned log-probs and entropies of a micro-batch: fp32 [T] each, 0 at every sequence's first token.

    Args:
        logits: [1, S, V/tp] as GPTModel returns them.
    """
    # By way of [S, 1, V/tp], the output layer's own shape: the gradient then has the strides that let its matrix
    # product run as one instead of one per token.
    by_position = logits.transpose(0, 1).squeeze(1)
    predicted, entropies = vocab_parallel_logprobs(
        by_position,
        micro_batch.targets,
        micro_batch.inverse_temperature,
        group,
        entropy=entropy,
        consume=True,
    )
    first = micro_batch.packed.positions == 0
    return (
        predicted[micro_batch.take].masked_fill(first, 0.0),
        entropies[micro_batch.take].masked_fill(first, 0.0),
    )
