"""Every legal value of the method options, in one place, without torch.

Invariants:
- A preset, anchor, weight, aggregation, estimator or advantage name is legal if and only if it is listed here. The
  implementations in `objectives` and `advantages` register under these names, and refuse to import when the two differ.
- The default thresholds of a preset are those of its paper; where the paper is silent the value is marked "chosen".
- A threshold left at ``None`` in the configuration takes the preset's default; `resolve` is the only place that decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType

OptionValue = float | str | bool


@dataclass(frozen=True, slots=True)
class Anchor:
    """A source of the old log-probs, the denominator of the staleness ratio r_s = π_θ/π_old.

    exact: the source scores each token under the weights of the token's own version.
    scored: another forward pass supplies it (`TokenBatch.anchor_logprobs`); otherwise the objective derives it.
    """

    name: str
    exact: bool
    scored: bool
    meaning: str


def _anchors(*rows: Anchor) -> Mapping[str, Anchor]:
    return MappingProxyType({row.name: row for row in rows})


ANCHORS: Mapping[str, Anchor] = _anchors(
    Anchor("start", False, True, "training engine, weights at the start of this update"),
    Anchor("rollout", False, False, "the engine's own log-probs μ, so that r_d = 1 and r_s = r"),
    Anchor("snapshot", True, True, "training engine, historical weights of the token's version restored"),
    Anchor("dedicated", True, True, "a second training-side model on its own ranks"),
    Anchor("interrupt", True, True, "scored before the version is replaced, while its weights are resident"),
    Anchor("ewma", False, True, "exponentially weighted average of the weights"),
    Anchor("linear", False, False, "π_prox = α μ + (1-α) π_θ with α = 1/(gap+1)"),
    Anchor("loglinear", False, False, "log π_prox = α log μ + (1-α) log π_θ with α = 1/(gap+1)"),
)

WEIGHTS: Mapping[str, str] = MappingProxyType(
    {
        "none": "1",
        "discrepancy": "r_d = π_old/μ",
        "truncated": "min(r_d, cap)",
    }
)
AGGREGATIONS: Mapping[str, str] = MappingProxyType(
    {
        "token_mean": "sum over tokens / action tokens of the global batch",
        "sequence_mean_token_mean": "mean over sequences of each sequence's token mean",
        "sequence_sum": "sum over tokens / sequences of the global batch",
    }
)
KL_ESTIMATORS: Mapping[str, str] = MappingProxyType(
    {
        "k1": "log π - log ref",
        "k2": "(log π - log ref)² / 2",
        "k3": "ref/π - 1 - log(ref/π)",
    }
)
ADVANTAGES: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "reward - group mean, divided by the group's standard deviation when normalise_std",
        "dr_grpo": "reward - group mean, never divided",
        "rloo": "reward - mean of the other rewards of the group",
        "batch_mean": "reward - mean of the batch",
        "running_mean": "reward - mean of the prompt's latest rewards seen before this batch",
        "gae": "skip-observation GAE with a critic (computed by `advantages.gae` from values)",
    }
)
SINGLETON_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "error": "a group of one is an error",
        "zero": "a group of one gets advantage 0",
        "running_mean": "a group of one is compared with the running mean of its prompt",
    }
)
DEFAULT_AGGREGATION = "token_mean"
DEFAULT_KL_ESTIMATOR = "k3"


@dataclass(frozen=True, slots=True)
class Option:
    """One preset-specific entry of `objective.options`."""

    default: OptionValue
    meaning: str
    choices: tuple[OptionValue, ...] | None = None
    low: float = -math.inf
    high: float = math.inf

    def check(self, where: str, value: object) -> OptionValue:
        """Return the value in the option's type. Raises ValueError naming the option and what it accepts."""
        if self.choices is not None:
            if value not in self.choices:
                raise ValueError(f"{where} is {value!r}; it must be one of {', '.join(map(str, self.choices))}")
            return value  # type: ignore[return-value]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{where} is {value!r}; it must be a number")
        if not self.low <= float(value) <= self.high:
            raise ValueError(f"{where} is {value}; it must lie in [{self.low:g}, {self.high:g}]")
        return float(value)


@dataclass(frozen=True, slots=True)
class Method:
    """What the configuration may say about one preset, and the defaults of its paper.

    mask: window of the discrepancy ratio r_d, as ratios; None = no mask unless the configuration sets both ends.
    clip: (ε_low, ε_high) around 1 of the surrogate's ratio; None = the surrogate has no such bounds.
    """

    name: str
    title: str
    paper: str
    equation: str
    surrogate: str
    anchors: tuple[str, ...]
    weights: tuple[str, ...] = ("none",)
    weight_text: str = ""
    mask_text: str = ""
    mask: tuple[float, float] | None = None
    maskable: bool = False
    clip: tuple[float, float] | None = None
    dual_clip: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()

    @property
    def anchor(self) -> str:
        """The default anchor."""
        return self.anchors[0]

    @property
    def weight(self) -> str:
        """The default weight."""
        return self.weights[0]


_EXACT = tuple(name for name, anchor in ANCHORS.items() if anchor.exact)
_OLD = ("start", *_EXACT, "ewma")
_PROXIES = ("linear", "loglinear")
_ANY_FROM_START = (*_OLD, *_PROXIES, "rollout")
_ANY_FROM_ROLLOUT = ("rollout", *_OLD, *_PROXIES)
_CAP = Option(2.0, "cap C of the truncated weight min(r_d, C)", low=0.0)
_LEVEL = Option("token", "ratio per token, or the geometric mean over the sequence", ("token", "sequence"))
_SCOPE = Option("batch", "tokens over which the statistic is taken", ("batch", "microbatch"))
_DELTA_TV = Option(0.2, "bound δ on |π-μ| (chosen)", low=0.0, high=1.0)

_METHODS = (
    Method("reinforce", "REINFORCE", "Williams 1992", "Â·log π", "log", ("rollout",)),
    Method(
        "ppo", "PPO (coupled)", "Schulman et al. 2017; DAPO for ε_high > ε_low",
        "min(r_s Â, clip(r_s, 1-ε_low, 1+ε_high) Â)", "min-clip", _ANY_FROM_ROLLOUT, clip=(0.2, 0.2), dual_clip=True,
    ),
    Method(
        "decoupled", "Decoupled PPO", "A (2605.12070); ewma and linear after A and A-3PO",
        "r_d · min(r_s Â, clip(r_s) Â)", "min-clip", _ANY_FROM_START, ("discrepancy", "none", "truncated"),
        mask=(0.990, 1.010), maskable=True, clip=(0.003, 0.004), dual_clip=True, options={"cap": _CAP},
    ),
    Method(
        "tis", "Truncated importance sampling", "TIS (Yao et al. 2025)", "min(r_d, C) · min-clip(r_s, Â)", "min-clip",
        _ANY_FROM_START, ("truncated",), clip=(0.2, 0.2), dual_clip=True, options={"cap": _CAP},
    ),
    Method(
        "mis", "Masked importance sampling", "MIS (Liu, Li et al. 2025)", "r_d^(level) · min-clip(r_s, Â)", "min-clip",
        _ANY_FROM_START, ("discrepancy", "none"), weight_text="r_d at the level",
        mask_text="low ≤ r_d ≤ high at the level", maskable=True, clip=(0.2, 0.2), dual_clip=True,
        options={
            "level": Option("token", "token ratio, product over the sequence, or its geometric mean",
                            ("token", "sequence", "geometric")),
            "veto": Option(1e-4, "a token ratio below this drops its whole sequence; 0 = off", low=0.0, high=1.0),
        },
    ),
    Method(
        "icepop", "IcePop", "IcePop (Ling Team 2025); GLM-5 uses β = 2", "r_d · min-clip(r_s, Â)", "min-clip",
        _ANY_FROM_START, ("discrepancy", "none"), mask=(0.5, 5.0), maskable=True, clip=(0.2, 0.2), dual_clip=True,
    ),
    Method(
        "gspo", "GSPO", "GSPO (2507.18071)", "min-clip(s, Â), s = exp(mean_t log r_s)", "min-clip on the sequence",
        _ANY_FROM_START, ("none", "discrepancy", "truncated"), maskable=True, clip=(3e-4, 4e-4), dual_clip=True,
        options={"cap": _CAP},
    ),
    Method(
        "cispo", "CISPO", "MiniMax-M1 (2506.13585); ε chosen", "sg[clip(r_s, 1-ε_low, 1+ε_high)] · Â·log π", "log",
        _ANY_FROM_ROLLOUT, weight_text="clip(r_s)", clip=(1.0, 4.0),
    ),
    Method(
        "dis", "Direct double-sided importance sampling", "B, SAO (2607.07508)",
        "sg[r · 1{1-ε_l < r < 1+ε_h}] · Â·log π", "log", ("rollout",), weight_text="r",
        mask_text="1-ε_l < r < 1+ε_h", clip=(0.3, 5.0),
    ),
    Method(
        "sat", "Staleness-adaptive trust region", "C (2607.18722)",
        "min(r Â, clip(r, 1-ε_low c₋, 1+ε_high c₊) Â)", "min-clip, contracted", ("rollout",), clip=(0.2, 0.2),
        dual_clip=True,
        options={
            "quantile": Option(0.90, "inverse-CDF quantile of |d| above which a token's end contracts",
                               low=0.0, high=1.0),
            "quantile_scope": _SCOPE,
            "level": _LEVEL,
        },
    ),
    Method(
        "dppo_tv", "DPPO-TV", "DPPO (2602.04879)", "sg[r · m] · Â·log π, m = 1{Â(r-1) ≤ 0 or |π-μ| ≤ δ}", "log",
        ("rollout",), weight_text="r", mask_text="Â(r-1) ≤ 0 or |π-μ| ≤ δ", options={"delta": _DELTA_TV},
    ),
    Method(
        "m2po", "M2PO", "M2PO (2510.01161)",
        "min-clip(r_s, Â) with ends e^{±τ}, τ from the second moment of log r_s", "min-clip, adaptive",
        _ANY_FROM_ROLLOUT, clip=(0.3, 0.5), dual_clip=True,
        options={
            "second_moment": Option(0.04, "bound on the second moment of log r over harmful tokens", low=0.0),
            "moment_scope": _SCOPE,
        },
    ),
    Method(
        "topr", "TOPR", "TOPR (2503.14286)", "reward > 0: Â·log π; else sg[clip(r, 0, 1)] · Â·log π", "log",
        ("rollout",), weight_text="1 if reward > 0 else clip(r, 0, 1)", needs=frozenset({"rewards"}),
    ),
    Method(
        "spo", "SPO", "SPO (2401.16025)", "r_s Â - |Â| (r_s-1)²/(2ε)", "quadratic", _ANY_FROM_ROLLOUT,
        options={"epsilon": Option(0.2, "half-width ε at which the penalty's slope meets the advantage's",
                                   low=1e-12)},
    ),
    Method(
        "drpo", "DRPO", "DRPO, formulas §7", "r Â - |Â| μ (r-1)²/(2δ)", "quadratic, weighted by μ", ("rollout",),
        options={"delta": Option(0.2, "bound δ on |π-μ| at which the slopes meet (chosen)", low=1e-12)},
    ),
)
METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _METHODS})

# Windows of `mis` by level: geometric is published; token and sequence are chosen.
MIS_WINDOWS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"token": (0.5, 2.0), "sequence": (0.5, 2.0), "geometric": (0.999, 1.001)}
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings of a preset after defaults: what the objective is built from."""

    method: Method
    anchor: Anchor
    weight: str
    mask: tuple[float, float] | None
    clip: tuple[float, float] | None
    options: Mapping[str, OptionValue]


def _choose(what: str, value: str, legal: Mapping[str, object] | tuple[str, ...]) -> str:
    if value not in legal:
        near = get_close_matches(value, list(legal), n=1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{what} is {value!r}{hint} Legal: {', '.join(legal)}")
    return value


def legal(what: str, value: str, table: Mapping[str, object]) -> str:
    """Return `value` if `table` lists it. Raises ValueError with the nearest match and every legal value."""
    return _choose(what, value, table)


def _pair(
    what: str, low: float | None, high: float | None, default: tuple[float, float] | None
) -> tuple[float, float] | None:
    if default is None and (low is None) != (high is None):
        raise ValueError(f"{what}_low and {what}_high must be set together here (got {low} and {high})")
    ends = (default[0] if low is None and default else low, default[1] if high is None and default else high)
    return None if ends[0] is None or ends[1] is None else (float(ends[0]), float(ends[1]))


def _resolve_options(method: Method, given: Mapping[str, OptionValue]) -> Mapping[str, OptionValue]:
    for key in given:
        _choose(f"objective.options key for {method.name}", key, tuple(method.options) or ("(this preset has none)",))
    return MappingProxyType(
        {
            key: option.check(f"objective.options.{key}", given.get(key, option.default))
            for key, option in method.options.items()
        }
    )


def _resolve_window(
    method: Method, low: float | None, high: float | None, options: Mapping[str, OptionValue]
) -> tuple[float, float] | None:
    if not method.maskable and not (low is None and high is None):
        raise ValueError(
            f"objective.mask_low/mask_high are set, but {method.name} has no mask on r_d; "
            "remove them, or choose decoupled, mis, icepop or gspo"
        )
    default = MIS_WINDOWS[str(options["level"])] if method.name == "mis" else method.mask
    window = _pair("objective.mask", low, high, default)
    if window is not None and not 0.0 <= window[0] <= 1.0 <= window[1]:
        raise ValueError(
            f"objective mask window is [{window[0]}, {window[1]}]; it is a window of ratios and must contain 1 "
            "(write 0.99 and 1.01, not 0.01)"
        )
    return window


def _resolve_clip(method: Method, low: float | None, high: float | None) -> tuple[float, float] | None:
    if method.clip is None and not (low is None and high is None):
        raise ValueError(
            f"objective.clip_low/clip_high are set, but {method.name} has no clip bounds; remove them"
            + (f" or set objective.options ({', '.join(method.options)})" if method.options else "")
        )
    clip = _pair("objective.clip", low, high, method.clip)
    if clip is not None and not (0.0 <= clip[0] <= 1.0 and clip[1] >= 0.0):
        raise ValueError(
            f"objective clip is ({clip[0]}, {clip[1]}); these are the distances ε from 1: "
            "0 ≤ clip_low ≤ 1 and clip_high ≥ 0 (write 0.2, not 0.8 or 1.2)"
        )
    return clip


def resolve(
    name: str,
    *,
    anchor: str | None = None,
    weight: str | None = None,
    mask_low: float | None = None,
    mask_high: float | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    options: Mapping[str, OptionValue] | None = None,
) -> Resolved:
    """Fill a preset's defaults in and check every value. ``None`` means "the preset's default".

    Raises ValueError naming the option, its value, and what is legal.
    """
    method = METHODS[_choose("objective.name", name, METHODS)]
    chosen = _choose(f"objective.anchor for {name}", anchor or method.anchor, method.anchors)
    settings = _resolve_options(method, options or {})
    return Resolved(
        method=method,
        anchor=ANCHORS[chosen],
        weight=_choose(f"objective.weight for {name}", weight or method.weight, method.weights),
        mask=_resolve_window(method, mask_low, mask_high, settings),
        clip=_resolve_clip(method, clip_low, clip_high),
        options=settings,
    )


# Mean |log r| that C reports for GRPO on Qwen3-30B-A3B-Base at lag 1; the drift that a tight mask will meet.
PUBLISHED_MEAN_ABS_LOG_RATIO = 0.0103
TIGHT_MASK = 0.02


def expected_mask_loss(low: float, high: float, mean_abs_log_ratio: float = PUBLISHED_MEAN_ABS_LOG_RATIO) -> float:
    """Share of tokens outside [low, high] if log r_d is Laplace-distributed with the given mean absolute value."""
    below = 0.5 * math.exp(math.log(low) / mean_abs_log_ratio) if low > 0 else 0.0
    return below + 0.5 * math.exp(-math.log(high) / mean_abs_log_ratio)


def corrects_staleness(resolved: Resolved) -> bool:
    """Whether the ratio to the sampling policy μ enters the loss at all, as ratio, weight or mask."""
    if resolved.method.name == "reinforce":
        return False
    if resolved.anchor.name in ("rollout", *_PROXIES) or resolved.weight != "none" or resolved.mask is not None:
        return True
    # An exact or averaged anchor leaves the policy's drift r_s in the surrogate; `start` leaves nothing.
    return resolved.anchor.name != "start"


def staleness_error(resolved: Resolved, max_staleness: int) -> str | None:
    """Why this objective may not train on stale tokens, or None. `max_staleness` is in versions."""
    if max_staleness <= 0 or corrects_staleness(resolved):
        return None
    return (
        f"rollout.max_staleness is {max_staleness}, but objective {resolved.method.name!r} with anchor "
        f"{resolved.anchor.name!r} never compares the policy with the one that sampled the tokens, so stale tokens "
        "bias the gradient unseen. Set rollout.max_staleness to 0, or use a correction "
        "(objective.name: decoupled, tis, dis, sat, ...)"
    )


def objective_warnings(
    resolved: Resolved, *, max_staleness: int, updates_per_batch: int, top_p: float = 1.0
) -> list[str]:
    """What a user should know before the run starts; each entry is one sentence with the values."""
    found = []
    anchor, mask = resolved.anchor, resolved.mask
    if mask is not None and not anchor.exact and anchor.name != "rollout" and max_staleness > 0:
        width = max(1.0 - mask[0], mask[1] - 1.0)
        if width <= TIGHT_MASK + 1e-12:
            found.append(
                f"mask [{mask[0]:g}, {mask[1]:g}] on the approximate anchor {anchor.name!r}: version drift enters r_d, "
                f"so about {expected_mask_loss(*mask):.0%} of the stale tokens will be masked (at the mean |log r| of "
                f"{PUBLISHED_MEAN_ABS_LOG_RATIO} published for lag 1). Use an exact anchor "
                f"({', '.join(_EXACT)}) or a wider mask"
            )
    # Sequence ratios and methods on μ keep moving; only r_s against the starting weights is stuck at 1.
    if anchor.name == "start" and updates_per_batch == 1 and resolved.method.clip is not None:
        found.append(
            "anchor 'start' with one update per batch: r_s is exactly 1, so the clip "
            f"({resolved.clip[0]:g}, {resolved.clip[1]:g}) can never act"
            if resolved.clip
            else "anchor 'start' with one update per batch: r_s is exactly 1"
        )
        if mask is not None:
            found[-1] += "; the mask on r_d carries all control"
    if top_p < 1.0:
        found.append(
            f"rollout.top_p is {top_p}: the engine samples from a truncated distribution while the trainer's log-probs "
            "are of the full one, so every ratio is biased; use top_p 1.0"
        )
    return found
