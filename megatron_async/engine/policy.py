"""The policy: a language model under any layout that scores its tokens, learns and exports. All methods are collective.

Invariants: see ``engine/token_model.py``; log-probs are token-aligned and those of the distribution that was sampled
(temperature applied).
"""

from dataclasses import replace
from functools import partial
from typing import Literal, overload

from megatron.core import parallel_state
from torch import Tensor

from megatron_async.engine.forward import token_logprobs
from megatron_async.engine.routing_replay import RoutingReplay, record_dtype
from megatron_async.engine.sequences import MicroBatch, Sequence
from megatron_async.engine.token_model import TokenError, TokenModel, TokenValues, TrainStepResult

__all__ = ["LogProbs", "Policy", "TokenError", "TrainStepResult"]

LogProbs = TokenValues


class Policy(TokenModel):
    """Build with ``Policy.build``. Its ``loss_fn`` takes ``(packed, logprobs [T], entropy [T])``."""

    _kinds = 2

    @overload
    def logprobs(self, sequences: list[Sequence], *, entropy: Literal[False] = False) -> LogProbs: ...

    @overload
    def logprobs(self, sequences: list[Sequence], *, entropy: Literal[True]) -> tuple[LogProbs, LogProbs]: ...

    def logprobs(
        self, sequences: list[Sequence], *, entropy: bool = False
    ) -> LogProbs | tuple[LogProbs, LogProbs]:
        """Log-probs of every token under the present weights: one float32 [L] per sequence, 0 at position 0.

        Args:
            entropy: also return the entropy of the distribution each token was drawn from, alike in shape.

        Raises:
            PackingError: a sequence longer than a micro-batch.
            TokenError: a token id outside the vocabulary.
        """
        logprobs, entropies = self._score(sequences, partial(_token_logprobs, entropy=entropy), self._kinds)
        return (logprobs, entropies) if entropy else logprobs

    def with_own_routing(self, sequences: list[Sequence]) -> list[Sequence]:
        """The same sequences, on record the experts that the routers choose for them under the present weights (R2).

        What else was on record is replaced. One forward pass; nothing is done unless `trainer.routing_replay` is
        "trainer" and the model has experts.

        Raises:
            PackingError: a sequence longer than a micro-batch.
        """
        if self.trainer.routing_replay != "trainer" or self.routing is None or not sequences:
            return sequences
        hf = self.hf_config
        chosen = self._record_routing([replace(s, routed_experts=None) for s in sequences])
        dtype = record_dtype(hf.num_experts)
        return [
            replace(s, routed_experts=rows[:-1].astype(dtype)) for s, rows in zip(sequences, chosen, strict=True)
        ]

    def _replays_in(self, *, training: bool) -> bool:
        return self.routing is not None and (training or self.trainer.routing_replay == "rollout")

    def _routing_replay(self) -> RoutingReplay | None:
        if self.trainer.routing_replay == "off" or not self.hf_config.is_moe:
            return None
        split = self.transformer_config.sequence_parallel
        return RoutingReplay(self.hf_config, self.models, sequence_parallel=split)

    def _readout(self, output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        return _token_logprobs(output, micro_batch, entropy=True)


def _token_logprobs(logits: Tensor, micro_batch: MicroBatch, *, entropy: bool) -> tuple[Tensor, ...]:
    group = parallel_state.get_tensor_model_parallel_group()
    return token_logprobs(logits, micro_batch, group, entropy=entropy)
