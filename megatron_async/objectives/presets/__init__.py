"""One file per method; importing this package registers them all."""

from megatron_async.objectives.presets import (
    cispo,
    decoupled,
    dis,
    dppo_tv,
    drpo,
    gspo,
    icepop,
    m2po,
    mis,
    ppo,
    reinforce,
    sat,
    spo,
    tis,
    topr,
)

__all__ = [
    "cispo",
    "decoupled",
    "dis",
    "dppo_tv",
    "drpo",
    "gspo",
    "icepop",
    "m2po",
    "mis",
    "ppo",
    "reinforce",
    "sat",
    "spo",
    "tis",
    "topr",
]
