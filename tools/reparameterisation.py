"""What mask and clip of an interpolated anchor mean on the total ratio π_θ/μ: a table of arXiv 2605.12070, made anew.

The windows are found by bisection on the loss kernel itself (which total ratios it masks and clips) and compared with
the closed form of Proposition 1 and, for the arithmetic proxy, with the values A publishes.

    python -m tools.reparameterisation
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch

from megatron_async.config.schema import ObjectiveConfig
from megatron_async.objectives import TokenBatch, build_objective
from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.proxies import (
    TotalRatioBounds,
    linear_proxy,
    loglinear_proxy,
    reparameterise,
)

MASK = (0.990, 1.010)
CLIP = (0.997, 1.004)
# Published for the arithmetic proxy: gap → mask low, mask high, clip low, clip high.
CHECK_VALUES = {
    1: (0.980, 1.020, 0.9940, 1.0080),
    2: (0.985, 1.015, 0.9911, 1.0121),
    3: (0.9867, 1.0133, 0.9881, 1.0162),
}
PROXIES = {"linear": linear_proxy, "loglinear": loglinear_proxy}


@dataclass(frozen=True, slots=True)
class Row:
    """One line: windows found on the kernel and by the closed form."""

    kind: str
    gap: int
    kernel: TotalRatioBounds
    closed_form: TotalRatioBounds

    @property
    def difference(self) -> float:
        """Largest distance between the two."""
        return max(abs(a - b) for a, b in zip(astuple(self.kernel), astuple(self.closed_form), strict=True))


def _terms(kind: str, gap: int, ratio: float, advantage: float) -> Terms:
    """The kernel's inputs for one token with the given total ratio."""
    objective = build_objective(
        ObjectiveConfig(
            name="decoupled",
            anchor=kind,
            mask_low=MASK[0],
            mask_high=MASK[1],
            clip_low=1 - CLIP[0],
            clip_high=CLIP[1] - 1,
        )
    )
    rollout = torch.tensor([-1.0], dtype=torch.float64)
    live = rollout + torch.tensor([ratio], dtype=torch.float64).log()
    gaps = torch.tensor([gap])
    batch = TokenBatch(
        rollout, None, torch.tensor([advantage], dtype=torch.float64), torch.tensor([True]), gaps * 0, gaps
    )
    return objective.preset.terms(Tokens(live, PROXIES[kind](rollout, live, gaps), batch), {})


def _edge(inside: Callable[[float], bool], outer: float) -> float:
    """Ratio between 1 (inside) and `outer` (outside) at which `inside` changes, by bisection."""
    near, far = 1.0, outer
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (middle, far) if inside(middle) else (near, middle)
    return near


def _accepted(terms: Terms) -> bool:
    return bool(terms.mask is None or terms.mask.item())


def _unclipped(terms: Terms) -> bool:
    return bool(terms.clipped is None or not terms.clipped.item())


def bounds_on_kernel(kind: str, gap: int) -> TotalRatioBounds:
    """Windows of the total ratio that the kernel really applies."""
    return TotalRatioBounds(
        mask_low=_edge(lambda r: _accepted(_terms(kind, gap, r, 1.0)), 0.5),
        mask_high=_edge(lambda r: _accepted(_terms(kind, gap, r, 1.0)), 1.5),
        clip_low=_edge(lambda r: _unclipped(_terms(kind, gap, r, -1.0)), 0.5),
        clip_high=_edge(lambda r: _unclipped(_terms(kind, gap, r, 1.0)), 1.5),
    )


def table() -> list[Row]:
    """Rows for both proxies and gaps 1, 2, 3."""
    return [
        Row(kind, gap, bounds_on_kernel(kind, gap), reparameterise(kind, gap, MASK, CLIP))
        for kind in PROXIES
        for gap in CHECK_VALUES
    ]


def main() -> int:
    """Print the table; exit code 1 if the kernel, the closed form and the published values disagree."""
    agree = True
    print(f"mask [{MASK[0]}, {MASK[1]}] on r_d, clip [{CLIP[0]}, {CLIP[1]}] on r_s, as windows of r = π_θ/μ")
    print(f"{'proxy':<10}{'n':>2}  {'mask':<20}{'clip':<20}{'kernel - closed form':<22}published")
    for row in table():
        b = row.kernel
        published = CHECK_VALUES[row.gap]
        # The paper states that the log-linear windows agree with the arithmetic ones within 1e-4
        tolerance = 6e-5 if row.kind == "linear" else 1.6e-4
        same = max(abs(x - y) for x, y in zip(astuple(b), published, strict=True)) < tolerance
        agree &= same and row.difference < 1e-9
        print(
            f"{row.kind:<10}{row.gap:>2}  [{b.mask_low:.4f}, {b.mask_high:.4f}]    "
            f"[{b.clip_low:.4f}, {b.clip_high:.4f}]    {row.difference:<22.1e}{'equal' if same else 'DIFFERS'}"
        )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
