"""Estimators of success over several samples of each task.

    pass^k = P(k samples all succeed)             = C(c, k) / C(n, k)          (tau-bench)
    pass@k = P(at least one of k samples succeeds) = 1 - C(n - c, k) / C(n, k)

for n samples of which c succeeded: unbiased, and averaged over tasks. The independent unit is the task: standard error
and interval are over tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

_NORMAL_95 = 1.96


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


Estimator = Callable[[int, int, int], float]
"""`pass_hat_k` or `pass_at_k`."""


def over_tasks(outcomes: Iterable[Sequence[bool]], samples: int, estimator: Estimator) -> dict[int, float]:
    """k -> mean of `estimator` over the tasks, for k = 1 .. the fewest samples of any task, at most `samples`.

    Every k is over the same tasks, as the benchmark does it: those that lack samples are not a random part of them, and
    without them pass^4 could exceed pass^1. Tasks without any sample are left out.
    """
    by_task = _by_task(outcomes, samples, estimator)
    return {k: sum(estimates) / len(estimates) for k, estimates in by_task.items()}


def intervals_over_tasks(
    outcomes: Iterable[Sequence[bool]], samples: int, estimator: Estimator
) -> dict[int, tuple[float, float] | None]:
    """k -> 95 % confidence interval of what `over_tasks` gives; None for a single task.

    Each task is one observation: its unbiased estimate, a number in [0, 1]. Their mean gets the `interval` that the
    mean of success rates gets (± 1.96 standard errors over tasks; Wilson or Clopper-Pearson near the edges), so those
    of pass^1, of pass@1 and of the success rate are one. Where k is the number of samples an estimate is 0 or 1, and
    the normal interval of 40 such tasks covers in 90 to 95 % of cases.
    """
    return {k: interval(estimates) for k, estimates in _by_task(outcomes, samples, estimator).items()}


def _by_task(
    outcomes: Iterable[Sequence[bool]], samples: int, estimator: Estimator
) -> dict[int, list[float]]:
    """k -> the estimate of each task that has samples."""
    groups = [group for group in outcomes if group]
    most = min((samples, *map(len, groups))) if groups else 0
    return {k: [estimator(len(group), sum(group), k) for group in groups] for k in range(1, most + 1)}


def interval(rates: Sequence[float]) -> tuple[float, float] | None:
    """95 % confidence interval of the mean of rates (numbers in [0, 1]), one per task; None for a single task.

    Mean ± 1.96 standard errors over tasks, where that lies within [0, 1]. Near the edges that error says too little,
    and where all tasks have the same rate it is 0, though n tasks cannot make a rate certain. There the n tasks are
    taken as n trials: Clopper-Pearson where all failed or all succeeded, else whatever either that or Wilson's interval
    allows. Trials by task are a bound: rates in [0, 1] never vary more than those of one trial per task.
    """
    n = len(rates)
    if n < 2:
        return None
    edge = 0.025 ** (1 / n)
    if max(rates) == 0.0:
        return 0.0, 1.0 - edge
    if min(rates) == 1.0:
        return edge, 1.0
    mean, same = sum(rates) / n, min(rates) == max(rates)
    half = 0.0 if same else _NORMAL_95 * standard_error(rates)
    low, high = mean - half, mean + half
    if same or low < 0.0 or high > 1.0:
        trials = _wilson(mean, n)
        low, high = min(low, trials[0]), max(high, trials[1])
    return max(0.0, low), min(1.0, high)


def _wilson(rate: float, n: int) -> tuple[float, float]:
    """The rates from which `rate`, of n trials, is 1.96 of their standard errors away."""
    centre = rate + _NORMAL_95**2 / (2 * n)
    half = _NORMAL_95 * math.sqrt(rate * (1 - rate) / n + _NORMAL_95**2 / (4 * n * n))
    scale = 1 + _NORMAL_95**2 / n
    return (centre - half) / scale, (centre + half) / scale
