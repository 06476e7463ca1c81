"""Estimators of success over several samples of each task.

    pass^k = P(k samples all succeed)             = C(c, k) / C(n, k)          (tau-bench)
    pass@k = P(at least one of k samples succeeds) = 1 - C(n - c, k) / C(n, k)

for n samples of which c succeeded: unbiased, and averaged over tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence


def pass_hat_k(samples: int, successes: int, k: int) -> float:
    """Unbiased estimate of P(k samples all succeed): C(c, k) / C(n, k); needs n >= k."""
    return math.comb(successes, k) / math.comb(samples, k)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples succeeds): 1 - C(n - c, k) / C(n, k); needs n >= k."""
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values: sample standard deviation / sqrt(n); NaN for a single value."""
    n = len(values)
    if n < 2:
        return math.nan
    mean = sum(values) / n
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def over_tasks(
    outcomes: Iterable[Sequence[bool]], samples: int, estimator: Callable[[int, int, int], float]
) -> dict[int, float]:
    """k -> mean of `estimator` over the tasks that have at least k samples, for k = 1 .. samples."""
    groups = list(outcomes)
    result = {}
    for k in range(1, samples + 1):
        values = [estimator(len(group), sum(group), k) for group in groups if len(group) >= k]
        if values:
            result[k] = sum(values) / len(values)
    return result
