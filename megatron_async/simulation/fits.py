"""Fits behind the calibration: what something takes alone, from seconds measured while the other side computed, too.

On shared processors both sides of a loop are described alike: what takes `features @ coefficients` seconds alone takes
`1 + interference * share` times as long if the other side computes for `share` of that time. That is linear in all but
the interference: non-negative least squares for each value of a grid.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

INTERFERENCES = np.linspace(0.0, 6.0, 121)
"""Values that are tried."""


def fit_slowdown(
    slowed: Array, steady: Array, share: Array, seconds: Array, interferences: Array = INTERFERENCES
) -> tuple[Array, float]:
    """Coefficients >= 0 (of `slowed`, then of `steady`) and interference that explain `seconds`.

    slowed: [n, a], features whose part of the time grows with the interference; steady: [n, b], those whose part does
    not; b may be 0. share, seconds: [n]. The coefficients meet the mean of `seconds`.
    """
    best: tuple[float, Array, float] | None = None
    for interference in interferences:
        features = np.concatenate([slowed * (1 + interference * share)[:, None], steady], axis=1)
        coefficients = non_negative_least_squares(features, seconds)
        # Least squares need not meet the mean, which decides throughput.
        coefficients *= seconds.sum() / max((features @ coefficients).sum(), 1e-12)
        error = float(np.sum((features @ coefficients - seconds) ** 2))
        if best is None or error < best[0]:
            best = error, coefficients, float(interference)
    assert best is not None
    return best[1], best[2]


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
