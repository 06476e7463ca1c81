"""Metrics of a step as sums: one float64 vector of fixed size, added over micro-batches and ranks by one all-reduce.

Invariants:
- Every entry is a sum or a histogram count, so adding vectors of any cut of the batch gives the batch's vector.
- Quantiles come from histograms with fixed bins, eight to each power of two from 2^-24 to 2^4: the reported value is
  the middle of its bin, within ±6.3 %. Means, counts and shares are exact.
- Version gaps 0..7 have a row each, and the last row takes every larger gap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async.objectives.kernel import Terms, Tokens
from megatron_async.objectives.segments import Segments

GAPS = 9
COLUMNS = (
    "tokens",
    "exact",
    "approximate",
    "weight",
    "weight_squared",
    "masked",
    "clipped_high",
    "clipped_low",
    "active",
    "log_discrepancy",
    "log_staleness",
    "log_total",
    "kl",
)
RATIOS = ("log_discrepancy", "log_staleness", "log_total")
LOWEST_OCTAVE = -24
OCTAVES = 28
BINS_PER_OCTAVE = 8
BINS = OCTAVES * BINS_PER_OCTAVE
GAP_BINS = 64
PREFIX = "objective/"

# Layout of the vector: sums by gap, histograms of ratios, gap, age and SAT's contraction, SAT's sums.
_SHAPES: dict[str, tuple[int, ...]] = {
    "sums": (GAPS, len(COLUMNS)),
    "ratios": (len(RATIOS), GAPS, BINS),
    "gaps": (GAP_BINS,),
    "ages": (BINS,),
    "age_sum": (1,),
    "contraction": (BINS,),
    "sat": (5,),  # tokens, gated, q, low end, high end
}
SIZE = sum(math.prod(shape) for shape in _SHAPES.values())
SECONDS_SCALE = 2.0**-22  # ages from 1/4 s to 2 years fall into the same bins


def _split(vector: Tensor) -> dict[str, Tensor]:
    """Views of the vector by name."""
    parts, at = {}, 0
    for name, shape in _SHAPES.items():
        size = math.prod(shape)
        parts[name] = vector[at : at + size].view(shape)
        at += size
    return parts


def _bins(magnitudes: Tensor) -> Tensor:
    """Histogram bin of each magnitude ≥ 0; what lies outside the range falls into the end bins.

    The exponent and the upper three bits of the mantissa of a float32, read as an integer, count eighths of octaves.
    """
    eighths = magnitudes.float().view(torch.int32) >> 20
    return eighths.sub_((127 + LOWEST_OCTAVE) * BINS_PER_OCTAVE).clamp_(0, BINS - 1).long()


def bin_value(index: int) -> float:
    """Middle of a bin; 0 for the first, which holds everything too small to matter."""
    octave, eighth = divmod(index, BINS_PER_OCTAVE)
    return 0.0 if index == 0 else 2.0 ** (LOWEST_OCTAVE + octave) * (1.0 + (eighth + 0.5) / BINS_PER_OCTAVE)


def _count(histogram: Tensor, index: Tensor, counted: Tensor) -> None:
    """Add `counted` (float64 [T], 1 or 0) to the histogram's entries at `index`."""
    histogram.view(-1).scatter_add_(0, index, counted)


def _columns(tokens: Tokens, terms: Terms, exact: Tensor) -> Tensor:
    """[K, T] float32 in the order of `COLUMNS`, 0 off the action tokens."""
    accepted = tokens.active if terms.mask is None else tokens.active & terms.mask
    out = torch.empty(len(COLUMNS), tokens.action.numel(), dtype=torch.float32, device=tokens.action.device)
    rows = dict(zip(COLUMNS, out, strict=True))
    rows["tokens"].copy_(tokens.action)
    rows["exact"].copy_(exact & tokens.active)
    rows["approximate"].copy_(~exact & tokens.active)
    rows["weight"].copy_(accepted if terms.weight is None else terms.weight.masked_fill(~accepted, 0.0))
    torch.square(rows["weight"], out=rows["weight_squared"])
    rows["masked"].copy_(tokens.action & ~accepted)
    working = accepted
    if terms.clipped is not None and terms.log_ratio is not None:
        clipped = terms.clipped & accepted
        above = terms.log_ratio > 0
        rows["clipped_high"].copy_(clipped & above)
        rows["clipped_low"].copy_(clipped & ~above)
        working = accepted & ~terms.clipped
    else:
        rows["clipped_high"].zero_()
        rows["clipped_low"].zero_()
    rows["active"].copy_(working)
    for name, ratio in zip(RATIOS, _log_ratios(tokens), strict=True):
        rows[name].copy_(ratio).abs_()
    total = tokens.log_total.float()
    rows["kl"].copy_(torch.expm1(total)).sub_(total)
    return out


def _log_ratios(tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    return tokens.log_discrepancy, tokens.log_staleness, tokens.log_total


@torch.no_grad()
def measure(tokens: Tokens, terms: Terms, exact: Tensor) -> Tensor:
    """The float64 vector [SIZE] of one micro-batch. exact: bool [T], tokens whose anchor is exact.

    Must run before the kernel consumes `terms`.
    """
    vector = torch.zeros(SIZE, dtype=torch.float64, device=tokens.action.device)
    parts = _split(vector)
    columns = _columns(tokens, terms, exact)
    gap = torch.where(tokens.action, tokens.batch.version_gap, 0).clamp_(0, GAP_BINS - 1)
    row = gap.clamp(max=GAPS - 1)
    by_gap = Segments.of(row)
    row_of_segment = torch.zeros(by_gap.number, dtype=torch.int64, device=row.device)
    row_of_segment.scatter_(0, by_gap.index, row)
    for number, column in enumerate(columns):
        parts["sums"][:, number].index_add_(0, row_of_segment, by_gap.total(column))
    action, active, first_bin = tokens.action.double(), tokens.active.double(), row * BINS
    for number, name in enumerate(RATIOS):
        _count(parts["ratios"][number], _bins(columns[COLUMNS.index(name)]).add_(first_bin), active)
    _count(parts["gaps"], gap, action)
    if tokens.batch.age_seconds is not None:
        age = torch.where(tokens.action, tokens.batch.age_seconds, 0.0)
        parts["age_sum"].copy_(age.double().sum())
        _count(parts["ages"], _bins(age * SECONDS_SCALE), action)
    if terms.diagnostics:
        _measure_sat(parts, tokens, terms)
    return vector


def _measure_sat(parts: dict[str, Tensor], tokens: Tokens, terms: Terms) -> None:
    """Sums of SAT's gate: tokens, gated tokens, q, and the widths ε_low c₋ and ε_high c₊ of the two sides."""
    assert terms.log_ratio is not None, "sat gives its log ratio"
    found, active = terms.diagnostics, tokens.active
    number = active.sum().double()
    lost = torch.where(active, 1.0 - found["contraction"], 0.0).double()
    above = torch.where(terms.log_ratio > 0, lost, 0.0).sum()
    epsilon_low, epsilon_high = found["epsilons"].unbind()
    entries = (
        number,
        (found["gated"] & active).sum().double(),
        found["q"].double() * number,
        epsilon_low * (number - (lost.sum() - above)),
        epsilon_high * (number - above),
    )
    parts["sat"].copy_(torch.stack(entries))
    _count(parts["contraction"], _bins(found["contraction"]), active.double())


@dataclass(frozen=True, slots=True)
class _Row:
    """Sums over some tokens, by column name."""

    sums: dict[str, float]
    histograms: list[list[float]]

    def metrics(self) -> dict[str, float]:
        tokens = self.sums["tokens"]
        share = {name: value / tokens for name, value in self.sums.items()}
        known = max(self.sums["exact"] + self.sums["approximate"], 1.0)
        out = {"tokens": tokens}
        for name, histogram in zip(RATIOS, self.histograms, strict=True):
            out[f"{name}/mean_abs"] = self.sums[name] / known
            out[f"{name}/p99_abs"] = histogram_quantile(histogram, 0.99)
        out["kl_k3"] = self.sums["kl"] / known
        squared = self.sums["weight_squared"]
        out["ess"] = self.sums["weight"] ** 2 / (squared * tokens) if squared > 0 else 0.0
        out["masked"] = share["masked"]
        out["clipped_high"], out["clipped_low"] = share["clipped_high"], share["clipped_low"]
        out["active"] = share["active"]
        out["anchor/exact"], out["anchor/approximate"] = share["exact"], share["approximate"]
        out["anchor/absent"] = 1.0 - share["exact"] - share["approximate"]
        return out


def histogram_quantile(counts: list[float], level: float) -> float:
    """Value of the first bin at which the counts reach `level` of their total; 0 for no counts."""
    target, seen = level * sum(counts), 0.0
    for index, count in enumerate(counts):
        seen += count
        if count > 0 and seen >= target * (1 - 1e-12):
            return bin_value(index)
    return 0.0


def _age_metrics(parts: dict[str, Tensor], tokens: float) -> dict[str, float]:
    held = [index for index, count in enumerate(parts["ages"].tolist()) if count > 0]
    if not held:
        return {}
    return {
        "staleness/seconds_mean": parts["age_sum"].item() / tokens,
        "staleness/seconds_min": bin_value(held[0]) / SECONDS_SCALE,
        "staleness/seconds_max": bin_value(held[-1]) / SECONDS_SCALE,
    }


def _gap_metrics(parts: dict[str, Tensor]) -> dict[str, float]:
    counts = parts["gaps"].tolist()
    held = [gap for gap, count in enumerate(counts) if count > 0]
    return {
        "staleness/versions_min": float(held[0]),
        "staleness/versions_mean": sum(gap * count for gap, count in enumerate(counts)) / sum(counts),
        "staleness/versions_max": float(held[-1]),
    }


def _sat_metrics(parts: dict[str, Tensor]) -> dict[str, float]:
    tokens, gated, q, low, high = parts["sat"].tolist()
    if tokens == 0:
        return {}
    held = [index for index, count in enumerate(parts["contraction"].tolist()) if count > 0]
    lowest = bin_value(held[0])
    return {
        "sat/q": q / tokens,
        "sat/gate_rate": gated / tokens,
        "sat/min_c": min(lowest, 1.0),
        "sat/epsilon_low": low / tokens,
        "sat/epsilon_high": high / tokens,
    }


def summarise(vector: Tensor) -> dict[str, float]:
    """Named metrics of the global batch from its reduced vector [SIZE]; empty when no token was an action.

    Names begin with "objective/" and are explained in docs/metrics.md; totals are plain ("objective/masked"), rows of a
    version gap end in "/gap_0" .. "/gap_8+".
    """
    parts = _split(vector.detach().to("cpu", torch.float64))
    sums, ratios = parts["sums"], parts["ratios"]

    def row(selected: slice) -> _Row:
        values = sums[selected].sum(dim=0).tolist()
        return _Row(dict(zip(COLUMNS, values, strict=True)), ratios[:, selected].sum(dim=1).tolist())

    total = row(slice(None))
    if total.sums["tokens"] == 0:
        return {}
    metrics = (
        total.metrics()
        | _gap_metrics(parts)
        | _age_metrics(parts, total.sums["tokens"])
        | _sat_metrics(parts)
    )
    for gap in range(GAPS):
        by_gap = row(slice(gap, gap + 1))
        if by_gap.sums["tokens"] > 0:
            label = f"gap_{gap}+" if gap == GAPS - 1 else f"gap_{gap}"
            metrics |= {f"{name}/{label}": value for name, value in by_gap.metrics().items()}
    if "log_discrepancy/mean_abs/gap_0" in metrics:
        metrics["engine_noise"] = metrics["log_discrepancy/mean_abs/gap_0"]
    return {PREFIX + name: value for name, value in metrics.items()}
