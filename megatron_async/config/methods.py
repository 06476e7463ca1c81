"""The one table of methods, anchors, weights and advantage estimators: their names, legal options and defaults.

Invariants: a legal value of `objective.*`, `old_logits.source` or `advantage.name` is listed here and nowhere else;
`objectives` and `advantages` read this table and fail at import time if an entry has no implementation. Thresholds are
those of the paper named; "chosen" marks the ones whose paper is silent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_async.config.errors import ConfigError, nearest
from megatron_async.config.schema import AdvantageConfig, ObjectiveConfig

OptionValue = float | str | bool


@dataclass(frozen=True, slots=True)
class Option:
    """One entry of `objective.options`: its type is the type of its default."""

    default: OptionValue
    meaning: str
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    optional: bool = False
    """Derived from other options when not given; then absent after `resolve_objective`."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """Log-probs that can stand in the denominator of the surrogate's ratio."""

    meaning: str
    exact: bool
    """The log-probs of the training engine under exactly the token's own version."""
    source: str
    """What `old_logits.source` is for it. "rollout", "linear" and "loglinear" need no scoring pass."""
    other_sources: tuple[str, ...] = ()
    """Further sources that give the same log-probs in another way."""
    built: bool = True
    """Whether `old_logits` can provide it; a run with one that is not built is refused before anything starts."""
    options: Mapping[str, Option] = field(default_factory=dict)


ANCHORS: dict[str, Anchor] = {
    "start": Anchor("training engine, weights at the start of this step", False, "start"),
    "rollout": Anchor("inference engine, as sampled", False, "rollout"),
    "snapshot": Anchor(
        "training engine, the token's version restored from the snapshot history",
        True,
        "snapshot",
        other_sources=("snapshot_full",),
    ),
    "dedicated": Anchor(
        "a second training-side model that scores while the actor updates", True, "dedicated"
    ),
    "interrupt": Anchor(
        "scored before each update, while the token's version is still resident",
        True,
        "interrupt",
    ),
    "ewma": Anchor(
        "training engine, weights averaged over versions",
        False,
        "ewma",
        options={
            "beta": Option(0.75, "decay of the average", low=0.0, high=1.0, optional=True),
            "staleness_window": Option(6.0, "sets beta = W / (W + 2)", low=0.0, optional=True),
            "reset_threshold": Option(
                0.9, "active fraction below which the average restarts", low=0.0, high=1.0
            ),
            "reset_patience": Option(1.0, "steps below the threshold before a restart (chosen)", low=1.0),
        },
    ),
    "linear": Anchor(
        "arithmetic mean of rollout and current probabilities, weight 1/(gap+1) on rollout", False, "linear"
    ),
    "loglinear": Anchor(
        "geometric mean of rollout and current probabilities, weight 1/(gap+1) on rollout",
        False,
        "loglinear",
    ),
}

SOURCES: tuple[str, ...] = tuple(
    dict.fromkeys(name for anchor in ANCHORS.values() for name in (anchor.source, *anchor.other_sources))
)

DIFFERENCES: tuple[str, ...] = ("snapshot", "dedicated")
"""Values of `old_logits.source` that keep the history as differences of the bits."""

WEIGHTS: dict[str, str] = {
    "none": "1",
    "discrepancy": "old/rollout",
    "truncated": "min(old/rollout, cap)",
    "total": "current/rollout",
    "clipped": "clip(current/anchor)",
}

_OLD = ("start", "snapshot", "dedicated", "interrupt", "ewma", "linear", "loglinear")
_ON_ROLLOUT = ("rollout", *_OLD)
_SAMPLED = ("rollout",)
_WINDOW_OFF = {"mask_low": 0.0, "mask_high": math.inf}
_PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_NO_CLIP = {"clip_low": math.inf, "clip_high": math.inf}
_CAP = Option(2.0, "largest weight", low=0.0)


@dataclass(frozen=True, slots=True)
class Method:
    """One preset of the loss kernel."""

    meaning: str
    source: str
    anchors: tuple[str, ...]
    """Legal anchors; the first is the method's own. Empty: the loss has no ratio to an anchor."""
    weights: tuple[str, ...]
    """Legal weights; the first is the method's own."""
    corrects_staleness: bool
    """Whether the loss stays a sensible policy gradient on tokens of older versions."""
    thresholds: Mapping[str, float]
    """Values of mask_low, mask_high, clip_low, clip_high where the configuration leaves them null."""
    options: Mapping[str, Option] = field(default_factory=dict)
    thresholds_by_option: Mapping[tuple[str, OptionValue], Mapping[str, float]] = field(default_factory=dict)
    """Thresholds that replace the above when an option has a given value."""


METHODS: dict[str, Method] = {
    "reinforce": Method(
        "policy gradient without a ratio", "Williams 1992", (), ("none",), False, {**_WINDOW_OFF, **_NO_CLIP}
    ),
    "ppo": Method(
        "min-clip on current/anchor",
        "Schulman et al. 2017",
        _ON_ROLLOUT,
        ("none", "discrepancy"),
        True,
        {**_WINDOW_OFF, **_PPO_CLIP},
    ),
    "decoupled": Method(
        "min-clip on current/old, masked where old and rollout disagree",
        "arXiv 2605.12070",
        (*_OLD, "rollout"),
        ("discrepancy", "none"),
        True,
        {"mask_low": 0.990, "mask_high": 1.010, "clip_low": 0.003, "clip_high": 0.004},
    ),
    "tis": Method(
        "min-clip weighted by the truncated discrepancy ratio",
        "truncated importance sampling",
        _OLD,
        ("truncated",),
        True,
        {**_WINDOW_OFF, **_PPO_CLIP},
        {"cap": _CAP},
    ),
    "mis": Method(
        "min-clip weighted by the discrepancy ratio, masked outside a window at token or sequence level",
        "masked importance sampling",
        _OLD,
        ("discrepancy", "none"),
        True,
        {"mask_low": 0.5, "mask_high": 2.0, **_PPO_CLIP},
        {
            "level": Option("token", "what the window speaks of", choices=("token", "sequence", "geometric")),
            "veto": Option(
                1e-4, "a token ratio below this drops its sequence; 0 never does", low=0.0, high=1.0
            ),
        },
        {("level", "geometric"): {"mask_low": 0.999, "mask_high": 1.001}},
    ),
    "icepop": Method(
        "min-clip weighted by the discrepancy ratio, masked outside [alpha, beta]",
        "IcePop",
        _OLD,
        ("discrepancy", "none"),
        True,
        {"mask_low": 0.5, "mask_high": 5.0, **_PPO_CLIP},
    ),
    "gspo": Method(
        "min-clip on the geometric mean ratio of the sequence",
        "GSPO",
        _ON_ROLLOUT,
        ("none", "discrepancy", "truncated"),
        True,
        {**_WINDOW_OFF, "clip_low": 3e-4, "clip_high": 4e-4},
        {"cap": _CAP},
    ),
    "cispo": Method(
        "log-likelihood weighted by the clipped ratio, so that no token loses its gradient",
        "CISPO (clip chosen)",
        _ON_ROLLOUT,
        ("clipped",),
        True,
        {**_WINDOW_OFF, "clip_low": 1.0, "clip_high": 4.0},
    ),
    "dis": Method(
        "log-likelihood weighted by current/rollout inside a window, nothing outside",
        "arXiv 2607.07508 (maths)",
        _SAMPLED,
        ("total",),
        True,
        {**_WINDOW_OFF, "clip_low": 0.3, "clip_high": 5.0},
    ),
    "sat": Method(
        "min-clip whose trust region contracts with staleness",
        "arXiv 2607.18722",
        _SAMPLED,
        ("none",),
        True,
        {**_WINDOW_OFF, **_PPO_CLIP},
        {
            "level": Option(
                "token", "ratio of a token or of the sequence (SAT-GSPO)", choices=("token", "sequence")
            ),
            "quantile": Option(
                0.90, "quantile of |log ratio| above which a token is gated", low=0.0, high=1.0
            ),
            "quantile_scope": Option(
                "batch", "tokens the quantile is taken over (chosen)", choices=("batch", "microbatch")
            ),
        },
    ),
    "dppo_tv": Method(
        "log-likelihood weighted by current/rollout inside a total-variation trust region",
        "DPPO (delta chosen)",
        _SAMPLED,
        ("total",),
        True,
        {**_WINDOW_OFF, **_NO_CLIP},
        {
            "delta": Option(
                0.15, "largest |current - rollout| probability in the update's direction", low=0.0, high=1.0
            )
        },
    ),
    "m2po": Method(
        "min-clip whose bounds keep the second moment of harmful log ratios small",
        "M2PO",
        _ON_ROLLOUT,
        ("none",),
        True,
        {**_WINDOW_OFF, "clip_low": 0.3, "clip_high": 0.5},
        {
            "second_moment": Option(
                0.04, "largest mean of min(|log ratio|, tau)^2 over harmful tokens", low=0.0
            ),
            "moment_scope": Option(
                "batch", "tokens the moment is taken over (chosen)", choices=("batch", "microbatch")
            ),
        },
    ),
    "topr": Method(
        "log-likelihood on rewarded trajectories, truncated ratio on the others",
        "TOPR",
        _ON_ROLLOUT,
        ("none",),
        True,
        {**_WINDOW_OFF, **_NO_CLIP},
    ),
    "spo": Method(
        "ratio with a quadratic penalty on its distance from 1",
        "SPO",
        _ON_ROLLOUT,
        ("none",),
        True,
        {**_WINDOW_OFF, **_NO_CLIP},
        {"epsilon": Option(0.2, "distance from 1 at which the surrogate peaks", low=1e-9)},
    ),
    "drpo": Method(
        "SPO with the penalty weighted by the token's rollout probability",
        "DRPO (delta chosen)",
        _ON_ROLLOUT,
        ("none",),
        True,
        {**_WINDOW_OFF, **_NO_CLIP},
        {"delta": Option(0.15, "probability change at which the surrogate peaks", low=1e-9)},
    ),
}


@dataclass(frozen=True, slots=True)
class Estimator:
    """One estimator of advantages."""

    meaning: str
    needs_group: bool
    """Whether the estimate compares trajectories of the same prompt."""
    window: int | None = None
    """Default number of past rewards it looks back on."""
    needs_critic: bool = False
    """Whether it takes the values of a critic, and gives every token its own advantage."""


ADVANTAGES: dict[str, Estimator] = {
    "grpo": Estimator("reward - mean of the group, divided by its standard deviation if normalise_std", True),
    "dr_grpo": Estimator("reward - mean of the group", True),
    "rloo": Estimator("reward - mean of the others in the group", True),
    "batch_mean": Estimator("reward - mean of the batch", False),
    "running_mean": Estimator("reward - mean of the latest rewards of the prompt", False, 8),
    "latest_mean": Estimator("reward - mean of the latest rewards of all prompts", False, 128),
    "gae": Estimator("skip-observation GAE over a critic's values, per token", False, needs_critic=True),
}


PUBLISHED_MEAN_LOG_RATIO = 0.0103
"""Mean |log current/rollout| that arXiv 2607.18722 reports for GRPO on Qwen3-30B-A3B-Base at lag 1."""


def expected_mask_loss(low: float, high: float, mean_log_ratio: float = PUBLISHED_MEAN_LOG_RATIO) -> float:
    """Share of stale tokens a mask [low, high] rejects once version drift of the given mean |log ratio| enters it.

    Takes the log ratio as Laplace-distributed: P(|x| > w) = exp(-w / mean).
    """
    below = 0.5 * math.exp(math.log(low) / mean_log_ratio) if low > 0 else 0.0
    return below + 0.5 * math.exp(-math.log(high) / mean_log_ratio)


def method(name: str) -> Method:
    """The entry of `METHODS`; raises ConfigError with the nearest name."""
    if name not in METHODS:
        raise ConfigError([f"objective.name: {name!r} is no method; {nearest(name, METHODS)}"])
    return METHODS[name]


def options_of(name: str, anchor: str) -> dict[str, Option]:
    """Legal options of method `name` with `anchor`."""
    return {**METHODS[name].options, **(ANCHORS[anchor].options if anchor in ANCHORS else {})}


def _check_choice(field_name: str, value: str, legal: tuple[str, ...], name: str) -> list[str]:
    if value in legal:
        return []
    return [f"objective.{field_name}: {value!r} does not go with method {name}; {nearest(value, legal)}"]


def _check_option(key: str, value: OptionValue, option: Option) -> list[str]:
    label = f"objective.options.{key}"
    if isinstance(option.default, bool | str):
        kind: tuple[type, ...] = (type(option.default),)
    else:
        kind = (int, float)
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
        return [
            f"{label}: {value!r} is a {type(value).__name__}, expected {kind[-1].__name__} ({option.meaning})"
        ]
    if option.choices and value not in option.choices:
        return [
            f"{label}: {value!r} is not one of {', '.join(option.choices)}; {nearest(str(value), option.choices)}"
        ]
    if not isinstance(value, str) and not option.low <= value <= option.high:
        return [f"{label}: {value} is outside [{option.low}, {option.high}] ({option.meaning})"]
    return []


def _resolve_options(config: ObjectiveConfig, anchor: str) -> tuple[dict[str, OptionValue], list[str]]:
    legal = options_of(config.name, anchor)
    problems: list[str] = []
    for key, value in config.options.items():
        if key not in legal:
            hint = (
                nearest(key, legal) if legal else f"method {config.name} with anchor {anchor} has no options"
            )
            problems.append(f"objective.options.{key}: unknown option of method {config.name}; {hint}")
        else:
            problems += _check_option(key, value, legal[key])
    filled: dict[str, OptionValue] = {key: o.default for key, o in legal.items() if not o.optional}
    filled.update(config.options)
    if anchor == "ewma" and "beta" in filled and "staleness_window" in filled:
        problems.append(
            "objective.options: beta and staleness_window are both given, but beta = W / (W + 2); keep one"
        )
    if anchor == "ewma" and "beta" not in filled and "staleness_window" not in filled:
        filled["beta"] = legal["beta"].default
    return filled, problems


def resolve_objective(config: ObjectiveConfig) -> ObjectiveConfig:
    """`config` with anchor, weight, thresholds and options made concrete.

    Raises ConfigError listing everything that does not fit the method. Resolving twice changes nothing.
    """
    preset = method(config.name)
    problems: list[str] = []
    anchor, weight = config.anchor, config.weight
    if anchor == "auto":
        anchor = preset.anchors[0] if preset.anchors else "rollout"
    problems += _check_choice("anchor", anchor, preset.anchors or ("rollout",), config.name)
    if weight == "auto":
        weight = preset.weights[0]
    problems += _check_choice("weight", weight, preset.weights, config.name)
    options, option_problems = _resolve_options(config, anchor)
    problems += option_problems
    if problems:
        raise ConfigError(problems)
    thresholds = dict(preset.thresholds)
    for (key, value), changed in preset.thresholds_by_option.items():
        if options.get(key) == value:
            thresholds.update(changed)
    given = {key: getattr(config, key) for key in thresholds if getattr(config, key) is not None}
    return replace(config, anchor=anchor, weight=weight, options=options, **{**thresholds, **given})


def resolve_advantage(config: AdvantageConfig) -> AdvantageConfig:
    """`config` with `window` made concrete; raises ConfigError with the nearest name for an unknown estimator."""
    if config.name not in ADVANTAGES:
        raise ConfigError(
            [f"advantage.name: {config.name!r} is no estimator; {nearest(config.name, ADVANTAGES)}"]
        )
    if config.window is None and ADVANTAGES[config.name].window is not None:
        return replace(config, window=ADVANTAGES[config.name].window)
    return config
