"""Running baselines: the mean of the latest rewards, per prompt or over all prompts (baselines of arXiv 2607.07508).

Invariant: a baseline is made of rewards seen *before* the batch it is compared with; `extend` comes after.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

EVERYTHING = ""


class RunningMean:
    """Latest `window` rewards under each key; keys are prompt ids, or one key for all prompts."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._latest: dict[str, deque[float]] = {}

    def mean(self, key: str) -> float | None:
        """Mean of the latest rewards of `key`; None before the first."""
        held = self._latest.get(key)
        return math.fsum(held) / len(held) if held else None

    def extend(self, keys: Sequence[str], rewards: Sequence[float]) -> None:
        """Remember rewards, in order."""
        for key, reward in zip(keys, rewards, strict=True):
            self._latest.setdefault(key, deque(maxlen=self._window)).append(reward)

    def state_dict(self) -> dict[str, Any]:
        return {"window": self._window, "latest": {key: list(held) for key, held in self._latest.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; a smaller window keeps the latest rewards."""
        self._latest = {key: deque(held, maxlen=self._window) for key, held in state["latest"].items()}
