"""PPO: min-clip on π_θ/anchor, neither weight nor mask by default.

Coupled with anchor μ, recomputed with anchor π_async.
ε_high > ε_low is DAPO's clip-higher.
"""

from __future__ import annotations

from megatron_async.objectives.min_clip import MinClip
from megatron_async.objectives.preset import preset


@preset("ppo")
class Ppo(MinClip):
    equation = "min(r_s Â, clip(r_s, 1-ε_low, 1+ε_high) Â)"
