"""The registry, its documentation, and the rules that need no tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_async.config.methods import (
    ANCHORS,
    METHODS,
    PUBLISHED_MEAN_LOG_RATIO,
    expected_mask_loss,
    resolve_objective,
)
from megatron_async.config.schema import ObjectiveConfig
from megatron_async.objectives import build_objective, objective_table
from megatron_async.objectives.preset import PRESETS, Preset, preset
from megatron_async.objectives.statistics import COLUMNS, RATIOS
from tools import render_objectives

ROOT = Path(__file__).resolve().parents[2]


def test_presets_and_listed_methods_are_the_same() -> None:
    """Field bug 23: legal values live in one place."""
    assert set(PRESETS) == set(METHODS)
    with pytest.raises(KeyError, match="add its options there first"):
        preset("unlisted")(Preset)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_legal_anchor_and_weight_builds(name: str) -> None:
    method = METHODS[name]
    built = [
        build_objective(ObjectiveConfig(name=name, anchor=anchor, weight=weight)).config
        for anchor in method.anchors or ("auto",)
        for weight in method.weights
    ]
    assert all(resolve_objective(config) == config for config in built)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_what_an_objective_needs_follows_from_its_anchor(name: str) -> None:
    for anchor in METHODS[name].anchors:
        needs = build_objective(ObjectiveConfig(name=name, anchor=anchor)).needs
        assert ("anchor" in needs) == (ANCHORS[anchor].exact or anchor == "ewma")


def test_needs_name_what_the_loss_will_ask_for() -> None:
    def needs(**settings: object) -> frozenset[str]:
        return build_objective(ObjectiveConfig(**settings)).needs  # type: ignore[arg-type]

    assert needs(name="ppo") == frozenset()
    assert needs(name="ppo", kl_coefficient=0.1) == {"reference"}
    assert needs(name="ppo", entropy_coefficient=0.1) == {"entropy"}
    assert needs(name="topr") == {"rewards"}
    assert needs(name="sat") == {"batch_statistics"}
    assert needs(name="sat", options={"quantile_scope": "microbatch"}) == frozenset()
    assert needs(name="gspo") == needs(name="mis") == {"whole_sequences"}
    assert needs(name="mis", options={"veto": 0.0}) == frozenset()
    assert needs(name="ppo", aggregation="sequence_mean_token_mean") == {"whole_sequences"}
    assert needs(name="ppo", rejected_in_denominator=False) == {"batch_statistics"}


def test_thresholds_of_the_papers_are_the_defaults() -> None:
    def thresholds(name: str, **options: str) -> tuple[float | None, ...]:
        config = resolve_objective(ObjectiveConfig(name=name, options=dict(options)))
        return config.mask_low, config.mask_high, config.clip_low, config.clip_high

    assert thresholds("decoupled") == (0.990, 1.010, 0.003, 0.004)
    assert thresholds("icepop") == (0.5, 5.0, 0.2, 0.2)
    assert thresholds("mis", level="geometric")[:2] == (0.999, 1.001)
    assert thresholds("gspo")[2:] == (3e-4, 4e-4)
    assert thresholds("dis")[2:] == (0.3, 5.0)
    assert thresholds("m2po")[2:] == (0.3, 0.5)
    assert resolve_objective(ObjectiveConfig(name="tis")).options["cap"] == 2.0
    assert resolve_objective(ObjectiveConfig(name="sat")).options["quantile"] == 0.90


def test_expected_loss_of_a_tight_mask() -> None:
    """Laplace: P(|log r| > w) = exp(-w/mean); ±1 % at the published drift loses more than a third."""
    assert expected_mask_loss(0.99, 1.01) == pytest.approx(0.379, abs=0.001)
    assert expected_mask_loss(0.0, float("inf")) == 0.0
    assert expected_mask_loss(0.99, 1.01, mean_log_ratio=PUBLISHED_MEAN_LOG_RATIO / 10) < 0.001


def test_generated_pages_are_current() -> None:
    stale = [path.name for path, text in render_objectives.pages().items() if path.read_text("utf-8") != text]
    assert stale == [], "run python -m tools.render_objectives"


def test_the_table_has_a_row_for_every_preset() -> None:
    rows = objective_table().splitlines()[2:]
    assert [re.match(r"\| \[(\w+)\]", row)[1] for row in rows] == list(METHODS)  # type: ignore[index]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {7}, "an unescaped bar would break a row"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "algorithms").glob("*.md")), ids=lambda p: p.stem)
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ppo\.md must hold the lines"):
        render_objectives.with_facts("# PPO\n", "ppo")


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    names = [f"objective/{ratio}/mean_abs" for ratio in RATIOS]
    names += [f"objective/{name}" for name in ("tokens", "kl_k3", "ess", "masked", "active", "engine_noise")]
    names += ["objective/clipped_high", "objective/clipped_low", "objective/anchor/exact", "objective/sat/q"]
    names += ["ewma/weight", "ewma/centre_of_mass", "ewma/resets", "objective/staleness/versions_min"]
    assert [name for name in names if f"`{name}`" not in page] == []
    assert len(COLUMNS) == len(set(COLUMNS))
