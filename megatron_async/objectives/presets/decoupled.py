"""Decoupled PPO (arXiv 2605.12070): weight and mask on r_d = π_old/μ, min-clip on r_s = π_θ/π_old.

With the default weight r_d the gradient is MIS·r·Â·∇log π, its Eqs 1-4. With an exact anchor r_d is engine noise
alone; with `start`, `ewma` or an interpolated anchor version drift enters it and a tight mask rejects usable tokens.
"""

from __future__ import annotations

from megatron_async.objectives.min_clip import MinClip
from megatron_async.objectives.preset import preset


@preset("decoupled")
class Decoupled(MinClip):
    equation = "w · min(r_s Â, clip(r_s, 1-ε_low, 1+ε_high) Â), w = r_d"
