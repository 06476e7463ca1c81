"""Fits behind the calibration: what something takes alone, from seconds measured while the other side computed, too.

On shared processors both sides of a loop are described alike: what takes `features @ coefficients` seconds alone takes
`1 + interference * share` times as long if the other side computes for `share` of that time. That is linear in all but
the interference: non-negative least squares for each value of a grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

INTERFERENCES = np.linspace(0.0, 6.0, 121)
"""Values that are tried."""


_MEAN_WEIGHT = 10.0
"""Weight of a run's mean, against all of its measurements together. Means decide throughput, and what differs between
runs says more of their settings than what differs by chance within one."""


@dataclass(frozen=True, slots=True)
class Samples:
    """n measurements of one run. slowed: [n, a], features whose part of the time grows with the interference; steady:
    [n, b], those whose part does not; b may be 0. share, seconds: [n]."""

    slowed: Array
    steady: Array
    share: Array
    seconds: Array

    def features(self, interference: float) -> Array:
        """[n, a + b], as they explain `seconds`."""
        return np.concatenate([self.slowed * (1 + interference * self.share)[:, None], self.steady], axis=1)


def fit_slowdown(runs: Sequence[Samples], interferences: Array = INTERFERENCES) -> tuple[Array, float]:
    """Coefficients >= 0 (of `slowed`, then of `steady`) and interference that explain the seconds of all runs.

    Raises ValueError when no run has a measurement.
    """
    runs = [run for run in runs if len(run.seconds)]
    if not runs:
        raise ValueError("nothing was measured")
    target = np.concatenate([_with_mean(run.seconds) for run in runs])
    best: tuple[float, Array, float] | None = None
    for interference in interferences:
        features = np.concatenate([_with_mean(run.features(interference)) for run in runs])
        coefficients = non_negative_least_squares(features, target)
        error = float(np.sum((features @ coefficients - target) ** 2))
        if best is None or error < best[0]:
            best = error, coefficients, float(interference)
    assert best is not None
    return best[1], best[2]


def _with_mean(values: Array) -> Array:
    """`values` of a run and, weighted, their mean."""
    weight = np.sqrt(_MEAN_WEIGHT * len(values))
    together: Array = np.concatenate([values, weight * values.mean(axis=0, keepdims=True)])
    return together


def non_negative_least_squares(features: Array, target: Array) -> Array:
    """argmin |features x - target|² over x >= 0, by trying every set of active columns (there are few columns)."""
    columns = features.shape[1]
    best, best_error = np.zeros(columns), float(target @ target)
    for size in range(1, columns + 1):
        for active in itertools.combinations(range(columns), size):
            solution = np.linalg.lstsq(features[:, active], target, rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(np.sum((features[:, active] @ solution - target) ** 2))
            if error < best_error:
                best, best_error = np.zeros(columns), error
                best[list(active)] = solution
    return best
