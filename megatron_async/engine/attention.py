"""Layer modules that need no fused kernels: core attention over packed sequences, and an RMSNorm for sequence parallel.

Used wherever Transformer Engine is not installed, on any device.

Invariants:
- A packed stream's sequences never see each other: attention runs per sequence, causally.
- Under context parallelism each rank holds, of every sequence, chunks r and 2c−1−r of 2c (the balanced
  "zig-zag" split that Megatron's RoPE uses), and the result is exact: keys and values are gathered.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked, so that its gradient is summed over ranks that hold different tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class PackedAttention(MegatronModule):
    """Scaled-dot-product core attention for packed (thd) streams and plain causal batches.

    Shapes: packed query [T, heads, d], key and value [T, groups, d] → [T, heads·d]; plain [s, b, heads, d] →
    [s, b, heads·d].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp = groups.cp
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend causally inside each packed sequence, or inside each row of a plain batch."""
        if packed_seq_params is None:
            if attention_mask is not None or self.cp.size() > 1:
                raise ValueError(
                    "PackedAttention takes plain causal batches without a mask, or packed sequences"
                )
            heads_first = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            return self._attend(*heads_first).permute(2, 0, 1, 3).flatten(2)
        lengths = _lengths(packed_seq_params)
        if self.cp.size() > 1:
            return self._packed_context_parallel(query, key, value, lengths)
        streams = (t.transpose(0, 1).split(lengths, 1) for t in (query, key, value))
        return (
            torch.cat([self._attend(q, k, v) for q, k, v in zip(*streams, strict=True)], 1)
            .transpose(0, 1)
            .flatten(1)
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """[..., heads, s, d] × [..., groups, s, d] → [..., heads, s, d]."""
        if q.dim() == 3:  # only batched inputs reach the kernels that do not materialise s × s scores
            return self._attend(q[None], k[None], v[None], mask)[0]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=True
        )

    def _packed_context_parallel(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]
    ) -> Tensor:
        size, rank = self.cp.size(), self.cp.rank()
        local = [n // size for n in lengths]
        key, value = (gather_from_sequence_parallel_region(t, group=self.cp) for t in (key, value))
        # The gathered stream is rank-major; per sequence, take every rank's part.
        key_parts = [part.split(local) for part in key.chunk(size)]
        value_parts = [part.split(local) for part in value.chunk(size)]
        outputs = []
        for i, q in enumerate(query.split(local)):
            positions = zigzag_positions(lengths[i], size).to(query.device)
            mask = positions.flatten()[None, :] <= positions[rank][:, None]
            k = torch.cat([part[i] for part in key_parts])
            v = torch.cat([part[i] for part in value_parts])
            attended = self._attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask)
            outputs.append(attended.transpose(0, 1))
        return torch.cat(outputs).flatten(1)


def _lengths(params: PackedSeqParams) -> list[int]:
    boundaries = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    return (boundaries[1:] - boundaries[:-1]).tolist()


def zigzag_positions(length: int, size: int) -> Tensor:
    """Positions of a sequence that each context-parallel rank holds: int64 [size, length / size].

    ``length`` must be a multiple of 2·size.
    """
    chunks = torch.arange(length).chunk(2 * size)
    return torch.stack([torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)])
