"""Baselines of one group of rewards. Pure functions on lists.

Invariant: equal rewards give advantages of exactly 0.0, whatever the rounding of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Keeps a nearly constant group from being blown up: its advantages stay below 1e6 times the spread (chosen).
STD_EPSILON = 1e-6


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether the rewards carry no comparison."""
    return all(reward == rewards[0] for reward in rewards)


def centred(rewards: Sequence[float]) -> list[float]:
    """reward - mean of all (Dr.GRPO)."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def standardised(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (standard deviation + 1e-6), with n-1 under the root (GRPO; the divisor is chosen)."""
    deviations = centred(rewards)
    if all_equal(rewards):
        return deviations
    deviation = math.sqrt(math.fsum(value * value for value in deviations) / (len(rewards) - 1))
    return [value / (deviation + STD_EPSILON) for value in deviations]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """reward - mean of the others (RLOO); needs at least two."""
    scale = len(rewards) / (len(rewards) - 1)
    return [scale * value for value in centred(rewards)]
