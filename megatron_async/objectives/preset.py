"""The interface of a method, and the register of the methods that exist.

Invariant: names, thresholds and options come from `config.methods`; a preset registers under a name listed there and
adds only the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from megatron_async.config.methods import METHODS
from megatron_async.config.schema import ObjectiveConfig
from megatron_async.objectives.batch import Gather
from megatron_async.objectives.kernel import Terms, Tokens

PRESETS: dict[str, type[Preset]] = {}


class Preset:
    """One method: weight, mask and surrogate of the kernel.

    config: resolved by `config.methods.resolve_objective`: no threshold is null, no choice is "auto".
    equation, surrogate, mask_text: what the generated table and the method's page say; weight_text too, where the
        names in `config.methods.WEIGHTS` do not say it.
    needs: token arrays the method reads beside the usual ones.
    """

    equation: ClassVar[str]
    surrogate: ClassVar[str]
    mask_text: ClassVar[str] = "low ≤ r_d ≤ high"
    weight_text: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: ObjectiveConfig) -> None:
        assert config.mask_low is not None and config.mask_high is not None, "resolve_objective sets the mask"
        assert config.clip_low is not None and config.clip_high is not None, "resolve_objective sets the clip"
        self.config = config
        self.dual = config.dual_clip
        self.mask_ends = (float(config.mask_low), float(config.mask_high))
        self.epsilons = (float(config.clip_low), float(config.clip_high))

    @property
    def batch_statistics(self) -> bool:
        """Whether `statistic` must see the global batch before the loss."""
        return False

    @property
    def whole_sequences(self) -> bool:
        """Whether a token's term depends on the other tokens of its sequence."""
        return False

    def statistic(self, tokens: Tokens, gather: Gather) -> dict[str, Tensor]:
        """Scalars over all tokens that `gather` reaches; called once per batch, or per micro-batch with no gather."""
        return {}

    def terms(self, tokens: Tokens, statistic: dict[str, Tensor]) -> Terms:
        """The kernel's inputs for one micro-batch."""
        raise NotImplementedError

    def number(self, option: str, default: float = math.inf) -> float:
        """A numeric option's value; `default` where the method has no such option."""
        return float(self.config.options.get(option, default))

    def choice(self, option: str) -> str:
        """A textual option's value."""
        return str(self.config.options[option])

    @property
    def clip_ends(self) -> tuple[float, float]:
        """(1-ε_low, 1+ε_high)."""
        return 1.0 - self.epsilons[0], 1.0 + self.epsilons[1]

    def weight(self, tokens: Tokens) -> Tensor | None:
        """w from `objective.weight`, per token; None = 1."""
        return None if self.config.weight == "none" else self.weight_of(tokens.discrepancy_ratio)

    def mask(self, tokens: Tokens) -> Tensor | None:
        """m from `objective.mask_low/mask_high`, per token; None = everything is accepted."""
        return None if self.mask_ends == (0.0, math.inf) else self.mask_of(tokens.discrepancy_ratio)

    def weight_of(self, ratio: Tensor) -> Tensor | None:
        """w by name (`config.methods.WEIGHTS`): 1 (None), the ratio, or min(ratio, cap)."""
        if self.config.weight == "none":
            return None
        return ratio.clamp(max=self.number("cap")) if self.config.weight == "truncated" else ratio

    def mask_of(self, ratio: Tensor) -> Tensor:
        """m = mask_low ≤ ratio ≤ mask_high, ends included."""
        return (ratio >= self.mask_ends[0]).logical_and_(ratio <= self.mask_ends[1])


def preset(name: str) -> Callable[[type[Preset]], type[Preset]]:
    """Register a preset class. Raises KeyError for a name that `config.methods` does not list."""
    if name not in METHODS:
        raise KeyError(f"preset {name!r} is not in config.methods.METHODS; add its options there first")

    def register(cls: type[Preset]) -> type[Preset]:
        PRESETS[name] = cls
        return cls

    return register
