"""Sampling parameters: from the configuration to a trajectory, and from a trajectory to one request.

Invariant: what a request asks for is derived from the trajectory's own `SamplingParams`, so the parameters that the
trainer reads later are those that were sampled with.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from megatron_async.config.schema import RolloutConfig
from megatron_async.trajectory import SamplingParams
from sglang_bridge import SamplingOptions

logger = logging.getLogger(__name__)


def training_sampling(config: RolloutConfig) -> SamplingParams:
    """Parameters of training rollouts. Warns when top-p or top-k cut the distribution that the trainer computes."""
    if config.top_p < 1.0 or config.top_k != -1:
        logger.warning(
            "rollout.top_p=%g and rollout.top_k=%d cut the sampled distribution; the trainer's log-probs are of the "
            "uncut one, so ratios are biased. Use top_p=1 and top_k=-1 for training.",
            config.top_p,
            config.top_k,
        )
    return SamplingParams(config.temperature, config.top_p, config.top_k, config.max_new_tokens)


def evaluation_sampling(config: RolloutConfig, temperature: float) -> SamplingParams:
    """Parameters of evaluation rollouts: those of training at another temperature (0 is greedy)."""
    return SamplingParams(temperature, config.top_p, config.top_k, config.max_new_tokens)


def turn_options(sampling: SamplingParams, budget: int, stop_token_ids: Iterable[int]) -> SamplingOptions:
    """Options of one request that may return at most `budget` tokens (what is left of the turn's budget)."""
    return SamplingOptions(
        max_new_tokens=budget,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=tuple(stop_token_ids),
    )
