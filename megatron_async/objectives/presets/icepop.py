"""IcePop: weight r_d inside a wide window of r_d, nothing outside, min-clip on r_s.

The ratio enters once as the detached weight; multiplying by it again would give r².
"""

from __future__ import annotations

from megatron_async.objectives.min_clip import MinClip
from megatron_async.objectives.preset import preset


@preset("icepop")
class IcePop(MinClip):
    equation = "r_d · 1{α ≤ r_d ≤ β} · min(r_s Â, clip(r_s) Â)"
