"""The presets that exist, checked against their options, and the table that documents them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_async.config.methods import METHODS, WEIGHTS, Method
from megatron_async.objectives import presets as presets
from megatron_async.objectives.preset import PRESETS, Preset

if set(PRESETS) != set(METHODS):
    raise ImportError(
        "config.methods.METHODS and the registered presets differ: only options for "
        f"{sorted(set(METHODS) - set(PRESETS))}, only a formula for {sorted(set(PRESETS) - set(METHODS))}"
    )

_HEADER = ("name", "anchor", "weight", "mask", "surrogate", "defaults")


def _defaults(method: Method) -> str:
    def thresholds(values: Mapping[str, float]) -> list[str]:
        parts = []
        if math.isfinite(values.get("mask_high", math.inf)):
            parts.append(f"mask [{values['mask_low']:g}, {values['mask_high']:g}]")
        if math.isfinite(values.get("clip_high", math.inf)):
            parts.append(f"ε {values['clip_low']:g}/{values['clip_high']:g}")
        return parts

    parts = thresholds(method.thresholds)
    for (key, value), changed in method.thresholds_by_option.items():
        parts += [f"{text} for {key} {value}" for text in thresholds(changed)]
    parts += [f"{key} {option.default}" for key, option in method.options.items() if not option.optional]
    return "; ".join(parts) or "none"


def _row(name: str, method: Method) -> tuple[str, ...]:
    preset = PRESETS[name]
    windowed = math.isfinite(method.thresholds["mask_high"]) or preset.mask_text != Preset.mask_text
    weights = preset.weight_text or ", ".join(WEIGHTS[weight] for weight in method.weights)
    mask = preset.mask_text if windowed else "all"
    cells = (", ".join(method.anchors) or "none", weights, mask, preset.surrogate, _defaults(method))
    # a bar inside a cell would end it
    return (f"[{name}]({name}.md)", *(cell.replace("|", "\\|") for cell in cells))


def objective_table() -> str:
    """Markdown table of every preset: its four inputs and default thresholds. First anchor and weight are defaults."""
    rows = [_HEADER, tuple("---" for _ in _HEADER), *(_row(*entry) for entry in METHODS.items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
