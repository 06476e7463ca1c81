"""Log-probs of the reference policy (version 0), for objectives with a KL penalty, beside those of any source.

Invariant: the reference weights and those of the policy exchange places while they score, and again afterwards; every
bit comes back, digests compared. It costs one more copy of the weights of the rank, and one forward over the batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_async.engine.hf_reader import load_pieces
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.old_logits.averaged import exchanged
from megatron_async.old_logits.source import AnchorLogprobs, OldLogitSource, timed
from megatron_async.snapshots.walker import Weights


class WithReference(OldLogitSource):
    """Adds `AnchorLogprobs.reference` to what `source` scores.

    reference: weights of the reference policy, in the order of `policy.named_parameters()`; not copied.
    """

    def __init__(self, policy: Policy, source: OldLogitSource, reference: list[Tensor]) -> None:
        self.source = source
        self._policy = policy
        self._reference = reference
        tensors = dict(policy.named_parameters())
        self._parameters = list(tensors.values())
        self._weights = Weights(tensors, task_words=None, threads=1)

    def score(self, sequences: list[Sequence], ids: SequenceOf[str]) -> AnchorLogprobs:
        anchors = self.source.score(sequences, ids)
        if not sequences:
            return anchors
        began = time.perf_counter()
        with exchanged(self._weights, self._exchange):
            reference, forward = timed(lambda: self._policy.logprobs(sequences))
        switch = time.perf_counter() - began - forward
        seconds = {"reference_forward": forward, "reference_switch": switch}
        return replace(anchors, reference=reference, seconds={**anchors.seconds, **seconds})

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, other in zip(self._parameters, self._reference, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(other)
            other.copy_(kept)

    @property
    def scores_ahead(self) -> bool:
        return self.source.scores_ahead

    def score_ahead(self, sequences: list[Sequence], ids: SequenceOf[str]) -> None:
        self.source.score_ahead(sequences, ids)

    @property
    def interrupts(self) -> bool:
        return self.source.interrupts

    def export(self, ids: SequenceOf[str]) -> dict[str, tuple[int, bytes]]:
        return self.source.export(ids)

    def restore(self, version: int, entries: Mapping[str, tuple[int, bytes]]) -> None:
        self.source.restore(version, entries)

    def updated(self, version: int, oldest_needed: int) -> None:
        self.source.updated(version, oldest_needed)

    def trained(self, active_fraction: float) -> None:
        self.source.trained(active_fraction)

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state)

    def close(self) -> None:
        self.source.close()


@torch.no_grad()
def reference_weights(policy: Policy, *, is_reference: bool) -> list[Tensor]:
    """Copies of the weights that `policy` was built from; is_reference: they are the present ones.

    Otherwise they are read from the checkpoint once more, through the policy's parameters, which get their bits back.
    """
    parameters = [parameter for _, parameter in policy.named_parameters()]
    present = [parameter.detach().clone() for parameter in parameters]
    if is_reference:
        return present
    load_pieces(policy.model_config.path, policy.table, policy.pieces())
    reference = [parameter.detach().clone() for parameter in parameters]
    for parameter, kept in zip(parameters, present, strict=True):
        parameter.copy_(kept)
    return reference
