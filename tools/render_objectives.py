"""Makes docs/algorithms/index.md and the facts at the top of each method's page from the registry.

`--check` writes nothing and says which pages are not current.

    python -m tools.render_objectives [--check]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from megatron_async.config.methods import ANCHORS, METHODS, WEIGHTS
from megatron_async.objectives import objective_table
from megatron_async.objectives.preset import PRESETS

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "algorithms"
BEGIN, END = "<!-- from the registry: begin -->", "<!-- from the registry: end -->"

_HEAD = """# Methods

Tables made from the registry by `python -m tools.render_objectives`; do not edit.

Every method is a preset on one loss kernel, L = -(1/N) Σ m · sg[w] · S(ratio, Â), and chooses its four inputs: the
**anchor** (whose log-probs stand in the ratio's denominator), a detached **weight** w, a **mask** m and a
**surrogate** S. N counts the action tokens of the *global* batch, rejected ones included unless
`objective.rejected_in_denominator` is false. Symbols:

| symbol | name in code | meaning |
| --- | --- | --- |
| μ | `rollout_logprobs` | reported by the engine that sampled the token |
| π_old | `anchor_logprobs` | the configured anchor |
| π_θ | `logprobs` | the policy being optimised |
| r_d = π_old/μ | `discrepancy_ratio` | engine noise, if the anchor is exact |
| r_s = π_θ/π_old | `log_staleness` | how far the policy moved since the token was sampled |
| r = π_θ/μ | `log_total` | r_d · r_s |

Papers that the pages call by a letter: **A** *Missing Old Logits in Asynchronous Agentic RL* (arXiv 2605.12070), **B**
*SAO, Single-Rollout Asynchronous Optimization* (2607.07508), **C** *Stale but Stable: Staleness-Adaptive Trust Region*
(2607.18722). Figures quoted from them are theirs, measured on their hardware.

Select one by `objective.name`; the first anchor and the first weight of a row are what `auto` takes.

{table}
## Anchors

| name | exact | meaning |
| --- | --- | --- |
{anchors}

`ewma` is described in [ewma.md](ewma.md), `linear` and `loglinear` in [interpolated.md](interpolated.md). How rewards
become advantages: [advantages.md](advantages.md); with single rollouts and a critic: [sao.md](sao.md).

## Every method also takes

- `aggregation`: `token_mean` (weighs tokens alike), `sequence_mean_token_mean` (weighs trajectories alike),
  `sequence_sum` (the unnormalised policy gradient per trajectory). All divide by counts of the global batch, so
  cutting it into micro-batches or over ranks changes nothing. Sums over a sequence of which context-parallel ranks hold
  shares (`gspo`, `sat` and `mis` at sequence level, `sequence_mean_token_mean`) are taken over all of them.
- `kl_coefficient` and `kl_estimator`: a penalty on every action token towards the reference policy. k1 = log π - log
  ref has an expected gradient of zero on fresh samples and only measures; k2 and k3 pull.
- `entropy_coefficient`: a bonus on the mean entropy of the action tokens.
- `dual_clip` (methods with a min-clip): for Â < 0 the surrogate is at least `dual_clip`·Â.

## Adding a method

1. List its name, legal anchors and weights, thresholds and options in `megatron_async/config/methods.py`.
2. Write `megatron_async/objectives/presets/<name>.py`: a class with `@preset("<name>")` whose `terms` returns value and
   slope of the surrogate, weight and mask. `surrogates.py` and `corrections.py` hold the usual pieces.
   One with a min-clip extends `MinClip` (`min_clip.py`) and often only sets its `equation`.
3. Add a reference from the formula to `tests/numerics/objective_reference.py` and a case to
   `tests/numerics/test_objective_reference.py`; the property tests find the method by themselves.
4. Write its page here and run `python -m tools.render_objectives`.
"""


def index() -> str:
    """The overview page."""
    anchors = "\n".join(
        f"| `{name}` | {'yes' if anchor.exact else 'no'} | {anchor.meaning} |"
        for name, anchor in ANCHORS.items()
    )
    return _HEAD.format(table=objective_table(), anchors=anchors)


def facts(name: str) -> str:
    """The lines about a method that the registry knows, between the markers."""
    method, preset = METHODS[name], PRESETS[name]
    bounded = {key: value for key, value in method.thresholds.items() if 0.0 < value < math.inf}
    thresholds = ", ".join(f"`{key}` {value:g}" for key, value in bounded.items())
    options = ", ".join(
        f"`{key}` {option.default} ({option.meaning})" for key, option in method.options.items()
    )
    weights = preset.weight_text or ", ".join(f"{weight} ({WEIGHTS[weight]})" for weight in method.weights)
    lines = [
        BEGIN,
        "",
        f"    S = {preset.equation}",
        "",
        f"- anchors: {', '.join(method.anchors) or 'none'}",
        f"- weights: {weights}",
        f"- thresholds: {thresholds or 'none'}",
        f"- options: {options or 'none'}",
        f"- code: [presets/{name}.py](../../megatron_async/objectives/presets/{name}.py)",
        "- test: [test_objective_reference.py](../../tests/numerics/test_objective_reference.py), "
        f"cases `{name}`: value and gradient against a float64 reference, relative error at most 1e-10",
        "",
        END,
    ]
    return "\n".join(lines)


def with_facts(text: str, name: str) -> str:
    """A method's page with the part between the markers made anew. Raises ValueError when it has no markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/algorithms/{name}.md must hold the lines {BEGIN} and {END}")
    return before + facts(name) + after


def pages() -> dict[Path, str]:
    """What every generated page should be."""
    made = {FOLDER / "index.md": index()}
    for name in METHODS:
        path = FOLDER / f"{name}.md"
        made[path] = with_facts(path.read_text(encoding="utf-8"), name)
    return made


def main(arguments: list[str]) -> int:
    """Write the pages, or with --check compare; returns the exit code."""
    stale = [
        path
        for path, text in pages().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path in stale:
            print(f"{path} is not current: run python -m tools.render_objectives", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
