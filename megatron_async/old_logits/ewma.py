"""PPO-EWMA: the weight average whose log-probs stand in for the old policy (arXiv 2605.12070). Pure torch, no Megatron.

    w ← 1 + β w_old;   θ_prox ← θ/w + β (w_old/w) θ_prox;   start w = 1, θ_prox = θ

Invariants:
- The recursion is normalised: a constant θ gives θ_prox = θ at every step, from the first.
- The average lives in float32 on the optimiser's master weights, whatever the model computes in.
- A reset makes θ_prox = θ and w = 1, and is counted.
Closed form: θ_prox(t) = Σ_k β^{t-k} θ(k) / Σ_k β^{t-k}. Its centre of mass tends to β/(1-β) = W/2 versions back for a
staleness window of W versions, hence β = W/(W+2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def beta_of_window(staleness_window: float) -> float:
    """β = W/(W+2), for which the average lies W/2 versions back. Raises ValueError for a negative window."""
    if staleness_window < 0:
        raise ValueError(f"staleness_window is {staleness_window}; it counts versions and must be at least 0")
    return staleness_window / (staleness_window + 2.0)


class ActiveFractionReset:
    """Auto-reset rule: ρ_t below `threshold` (τ) for `patience` consecutive steps.

    ρ_t is the fraction of action tokens still active after mask *and* clip ("objective/active" of the step's metrics).
    """

    def __init__(self, threshold: float = 0.9, patience: int = 1) -> None:
        if not 0.0 <= threshold <= 1.0 or patience < 1:
            raise ValueError(
                f"reset_threshold is {threshold} and reset_patience {patience}; need a share in [0, 1] and "
                "at least 1 step"
            )
        self.threshold = threshold
        self.patience = int(patience)
        self.below = 0

    def observe(self, active_fraction: float) -> bool:
        """Whether the average must restart after a step with this active fraction."""
        self.below = self.below + 1 if active_fraction < self.threshold else 0
        if self.below < self.patience:
            return False
        self.below = 0
        return True


class WeightAverage:
    """Normalised exponentially weighted average of a list of weights.

    weights: the fp32 masters of this rank's shard at the start (θ at version 0 of the average); copied.
    beta: decay in [0, 1). reset: the auto-reset rule.
    """

    def __init__(
        self, weights: Iterable[Tensor], beta: float, reset: ActiveFractionReset | None = None
    ) -> None:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"beta is {beta}; it must lie in [0, 1), 1 would never forget")
        self.beta = beta
        self.rule = reset or ActiveFractionReset()
        self.values = [weight.detach().to(torch.float32, copy=True) for weight in weights]
        self.weight = 1.0
        self.steps = 0
        self.resets = 0

    @property
    def centre_of_mass(self) -> float:
        """Versions that the average lies behind θ: Σ_k k β^k / Σ_k β^k over the steps since the last reset."""
        ages = range(self.steps + 1)
        return sum(age * self.beta**age for age in ages) / sum(self.beta**age for age in ages)

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor]) -> None:
        """Take in θ after an optimiser step. Raises ValueError when number or shapes differ from the start's."""
        self._check(weights)
        before = self.weight
        self.weight = 1.0 + self.beta * before
        keep = self.beta * before / self.weight
        for average, current in zip(self.values, weights, strict=True):
            # θ_prox + (1-keep)(θ - θ_prox): exact for a constant θ, since 1/w = 1 - keep
            average.lerp_(current.to(torch.float32), 1.0 - keep)
        self.steps += 1

    def observe(self, active_fraction: float, weights: Sequence[Tensor]) -> bool:
        """Apply the auto-reset rule after a step; True when the average was reset to `weights`."""
        if not self.rule.observe(active_fraction):
            return False
        self.reset(weights)
        return True

    @torch.no_grad()
    def reset(self, weights: Sequence[Tensor]) -> None:
        """θ_prox ← θ, w ← 1."""
        self._check(weights)
        for average, current in zip(self.values, weights, strict=True):
            average.copy_(current)
        self.weight, self.steps = 1.0, 0
        self.resets += 1

    def _check(self, weights: Sequence[Tensor]) -> None:
        ours, theirs = [tuple(v.shape) for v in self.values], [tuple(w.shape) for w in weights]
        if ours != theirs:
            different = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
            raise ValueError(
                f"the average holds {len(ours)} tensors, it was given {len(theirs)}; first differing shapes: "
                f"{[(ours[i], theirs[i]) for i in different[:3]]}. Averages do not move between layouts or models"
            )

    def metrics(self) -> dict[str, float]:
        """w, centre of mass in versions, and resets so far."""
        return {
            "ewma/weight": self.weight,
            "ewma/centre_of_mass": self.centre_of_mass,
            "ewma/resets": float(self.resets),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs; the tensors are the live ones, not copies."""
        return {
            "beta": self.beta,
            "weight": self.weight,
            "steps": self.steps,
            "resets": self.resets,
            "below": self.rule.below,
            "values": self.values,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. Raises ValueError when β or the shapes differ."""
        if state["beta"] != self.beta:
            raise ValueError(
                f"the saved average decays by beta = {state['beta']}, the configuration says {self.beta}; keep the "
                "saved one, or start without the saved average"
            )
        self._check(state["values"])
        for average, saved in zip(self.values, state["values"], strict=True):
            average.copy_(saved)
        self.weight, self.steps = float(state["weight"]), int(state["steps"])
        self.resets, self.rule.below = int(state["resets"]), int(state["below"])
