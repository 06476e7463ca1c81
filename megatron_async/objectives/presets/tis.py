"""Truncated importance sampling: weight min(r_d, C), no mask by default, min-clip on r_s."""

from __future__ import annotations

from megatron_async.objectives.min_clip import MinClip
from megatron_async.objectives.preset import preset


@preset("tis")
class Tis(MinClip):
    equation = "min(r_d, C) · min(r_s Â, clip(r_s) Â)"
