"""The losses written token by token in Python floats and autograd scalars, from the formulas of docs/algorithms.

Nothing here uses the library's kernel: action tokens are picked first, ratios are scalars, gradients come from autograd
on those scalars, quantiles from sorted lists, M2PO's τ from bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Token:
    """One action token; `live` is a float64 scalar that requires grad."""

    live: Tensor
    rollout: float
    anchor: float
    advantage: float
    gap: int
    reward: float
    reference: float

    @property
    def r_d(self) -> float:
        return math.exp(self.anchor - self.rollout)

    @property
    def r_s(self) -> Tensor:
        return torch.exp(self.live - self.anchor)

    @property
    def r(self) -> Tensor:
        return torch.exp(self.live - self.rollout)


Sequence = list[Token]


@dataclass(frozen=True)
class Settings:
    """Thresholds of a run: mask as ratios, epsilons of the clip, options by name."""

    mask: tuple[float, float] = (0.0, math.inf)
    eps: tuple[float, float] = (0.2, 0.2)
    weight: str = "none"
    dual: float | None = None
    level: str = "token"
    cap: float = 2.0
    veto: float = 0.0
    quantile: float = 0.9
    delta: float = 0.15
    epsilon: float = 0.2
    moment: float = 0.04


def clipped_surrogate(ratio: Tensor, advantage: float, low: float, high: float, dual: float | None) -> Tensor:
    """min(r Â, clip(r, low, high) Â), then max with dual Â where Â < 0."""
    inside = torch.clamp(ratio, low, high)
    value = torch.minimum(ratio * advantage, inside * advantage)
    if dual is not None and advantage < 0:
        value = torch.maximum(value, torch.tensor(dual * advantage, dtype=torch.float64))
    return value


def _weight(kind: str, ratio: float, cap: float) -> float:
    return {"none": 1.0, "discrepancy": ratio, "truncated": min(ratio, cap)}[kind]


def _inside(ratio: float, window: tuple[float, float]) -> float:
    return 1.0 if window[0] <= ratio <= window[1] else 0.0


def min_clip_family(sequences: list[Sequence], s: Settings) -> list[list[Tensor]]:
    """ppo, decoupled, tis, icepop: m w min-clip(r_s)."""
    return [
        [
            _inside(t.r_d, s.mask)
            * _weight(s.weight, t.r_d, s.cap)
            * clipped_surrogate(t.r_s, t.advantage, 1 - s.eps[0], 1 + s.eps[1], s.dual)
            for t in sequence
        ]
        for sequence in sequences
    ]


def mis(sequences: list[Sequence], s: Settings) -> list[list[Tensor]]:
    terms = []
    for sequence in sequences:
        logs = [t.anchor - t.rollout for t in sequence]
        vetoed = any(math.exp(log) < s.veto for log in logs)
        whole = {"sequence": math.exp(sum(logs)), "geometric": math.exp(sum(logs) / max(len(logs), 1))}
        row = []
        for t in sequence:
            ratio = whole.get(s.level, t.r_d)
            keep = 0.0 if vetoed else _inside(ratio, s.mask)
            surrogate = clipped_surrogate(t.r_s, t.advantage, 1 - s.eps[0], 1 + s.eps[1], s.dual)
            row.append(keep * _weight(s.weight, ratio, s.cap) * surrogate)
        terms.append(row)
    return terms


def gspo(sequences: list[Sequence], s: Settings) -> list[list[Tensor]]:
    terms = []
    for sequence in sequences:
        mean = sum(t.live - t.anchor for t in sequence) / max(len(sequence), 1)
        ratio = torch.exp(torch.as_tensor(mean, dtype=torch.float64))
        terms.append(
            [
                _inside(t.r_d, s.mask)
                * _weight(s.weight, t.r_d, s.cap)
                * clipped_surrogate(ratio, t.advantage, 1 - s.eps[0], 1 + s.eps[1], s.dual)
                for t in sequence
            ]
        )
    return terms


def _each(
    formula: Callable[[Token, Settings], Tensor],
) -> Callable[[list[Sequence], Settings], list[list[Tensor]]]:
    return lambda sequences, s: [[formula(t, s) for t in sequence] for sequence in sequences]


def _cispo(t: Token, s: Settings) -> Tensor:
    return min(max(t.r_s.item(), 1 - s.eps[0]), 1 + s.eps[1]) * t.advantage * t.live


def _dis(t: Token, s: Settings) -> Tensor:
    ratio = t.r.item()
    return (ratio if 1 - s.eps[0] < ratio < 1 + s.eps[1] else 0.0) * t.advantage * t.live


def _dppo(t: Token, s: Settings) -> Tensor:
    ratio = t.r.item()
    close = abs(math.exp(t.live.item()) - math.exp(t.rollout)) <= s.delta
    keep = t.advantage * (ratio - 1) <= 0 or close
    return (ratio if keep else 0.0) * t.advantage * t.live


def _topr(t: Token, s: Settings) -> Tensor:
    return (1.0 if t.reward > 0 else min(t.r.item(), 1.0)) * t.advantage * t.live


def _spo(t: Token, s: Settings) -> Tensor:
    return t.r_s * t.advantage - abs(t.advantage) * (t.r_s - 1) ** 2 / (2 * s.epsilon)


def _drpo(t: Token, s: Settings) -> Tensor:
    return t.r * t.advantage - abs(t.advantage) * math.exp(t.rollout) * (t.r - 1) ** 2 / (2 * s.delta)


def quantile(values: list[float], level: float) -> float:
    """Smallest value with at least a share `level` of the values at or below it."""
    ordered = sorted(values)
    return next(v for i, v in enumerate(ordered) if (i + 1) / len(ordered) >= level - 1e-12)


def psi(u: float, q: float) -> float:
    return 1.0 / (1.0 + (u / q) ** 2)


def sat(sequences: list[Sequence], s: Settings) -> list[list[Tensor]]:
    ratios = []
    for sequence in sequences:
        mean = sum(t.live - t.rollout for t in sequence) / max(len(sequence), 1)
        ratios.append([t.live - t.rollout if s.level == "token" else torch.as_tensor(mean) for t in sequence])
    q = quantile([abs(d.item()) for row in ratios for d in row], s.quantile)
    terms = []
    for sequence, row in zip(sequences, ratios, strict=True):
        out = []
        for t, log_ratio in zip(sequence, row, strict=True):
            d = log_ratio.item()
            gated = q > 0 and abs(d) > q
            plus = psi(max(d, 0.0), q) if gated else 1.0
            minus = psi(max(-d, 0.0), q) if gated else 1.0
            low, high = 1 - s.eps[0] * minus, 1 + s.eps[1] * plus
            out.append(clipped_surrogate(torch.exp(log_ratio), t.advantage, low, high, s.dual))
        terms.append(out)
    return terms


def second_moment_truncation(logs: list[float], bound: float) -> float:
    """τ by bisection; infinity when the plain second moment meets the bound."""
    if not logs or sum(x * x for x in logs) / len(logs) <= bound:
        return math.inf
    low, high = 0.0, max(logs)
    for _ in range(200):
        middle = (low + high) / 2
        moment = sum(min(x, middle) ** 2 for x in logs) / len(logs)
        low, high = (middle, high) if moment <= bound else (low, middle)
    return low


def m2po(sequences: list[Sequence], s: Settings) -> list[list[Tensor]]:
    tokens = [t for sequence in sequences for t in sequence]
    harmful = [t for t in tokens if (t.advantage > 0 and t.r_s > 1) or (t.advantage < 0 and t.r_s < 1)]
    tau = second_moment_truncation([abs(math.log(t.r_s.item())) for t in harmful], s.moment)
    low, high = min(math.exp(-tau), 1 - s.eps[0]), max(math.exp(tau), 1 + s.eps[1])
    return [
        [clipped_surrogate(t.r_s, t.advantage, low, high, s.dual) for t in sequence] for sequence in sequences
    ]


REFERENCES: dict[str, Callable[[list[Sequence], Settings], list[list[Tensor]]]] = {
    "reinforce": _each(lambda t, s: t.advantage * t.live),
    "ppo": min_clip_family,
    "decoupled": min_clip_family,
    "tis": min_clip_family,
    "icepop": min_clip_family,
    "mis": mis,
    "gspo": gspo,
    "cispo": _each(_cispo),
    "dis": _each(_dis),
    "dppo_tv": _each(_dppo),
    "topr": _each(_topr),
    "spo": _each(_spo),
    "drpo": _each(_drpo),
    "sat": sat,
    "m2po": m2po,
}


def aggregate(terms: list[list[Tensor]], kind: str) -> Tensor:
    """-Σ over the batch, divided as the aggregation says; every list is one sequence's action tokens."""
    held = [row for row in terms if row]
    if kind == "token_mean":
        return -sum(sum(row) for row in held) / sum(len(row) for row in held)  # type: ignore[return-value]
    if kind == "sequence_sum":
        return -sum(sum(row) for row in held) / len(held)  # type: ignore[return-value]
    return -sum(sum(row) / len(row) for row in held) / len(held)  # type: ignore[return-value]
