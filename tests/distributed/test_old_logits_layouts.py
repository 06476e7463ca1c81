"""Old log-probs by time travel, under real layouts and real optimiser steps: bits there, bits back, same log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import launch
from tests.engine_reference import make_model

SCRIPT = Path(__file__).with_name("old_logits_ranks.py")
VERSIONS = 5
TWO_RANKS = (
    "moe:tp2:bf16",
    "moe:ep2:bf16:distributed",
    "moe:ep2:fp32:distributed",
    "dense:pp2:bf16:distributed",
    "dense:fp32",
)
FOUR_RANKS = ("moe:tp2:ep2:bf16:distributed", "moe:tp2:ep2:bf16", "moe:tp2:pp2:bf16:distributed")


def run(
    directory: Path, ranks: int, cases: tuple[str, ...], timeout_s: float = 240
) -> dict[str, list[dict[str, Any]]]:
    for kind in ("dense", "moe"):
        make_model(kind).save_pretrained(directory / kind / "model")
    launch(SCRIPT, ranks, str(directory), *cases, logs=directory / "logs", timeout_s=timeout_s)
    return json.loads((directory / "findings.json").read_text())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run(tmp_path_factory.mktemp("old_logits"), 2, TWO_RANKS)


def check_every_version_comes_back(ranks: list[dict[str, Any]], versions: int = VERSIONS) -> None:
    for found in ranks:
        assert found["versions"] == list(range(versions + 1))
        assert found["moved"] > 0
        assert found["wrong_pairs"] == []
        assert found["weights_unchanged"]
        assert found["reopened"]


def check_logprobs_are_those_of_their_time(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["exact_tokens"] > 0
        assert found["differing_logprobs"] == 0
        assert found["differing_by_copies"] == 0
        assert found["reused_are_missing_only_at_gap_0"]


@pytest.mark.parametrize("case", TWO_RANKS)
def test_every_version_restores_from_every_other_bit_for_bit(two_ranks: dict[str, Any], case: str) -> None:
    """By differences and by full copies, on every rank, and again from disk after the store was closed."""
    check_every_version_comes_back(two_ranks[case])
    assert len(two_ranks[case]) == 2


@pytest.mark.parametrize("case", TWO_RANKS)
def test_logprobs_equal_those_computed_when_the_version_was_current(
    two_ranks: dict[str, Any], case: str
) -> None:
    check_logprobs_are_those_of_their_time(two_ranks[case])
    assert two_ranks[case][0]["metrics"]["old_logits/share/exact"] < 1.0  # one stretch is flagged


@pytest.mark.parametrize("case", TWO_RANKS)
def test_weights_with_masters_need_no_copy_to_compare_with(two_ranks: dict[str, Any], case: str) -> None:
    """bf16: the differences are taken inside the optimiser step; fp32 weights are their own masters."""
    for found in two_ranks[case]:
        assert found["has_masters"] == ("bf16" in case)
        assert (found["kept_memory"]["shadow"] == 0) == found["has_masters"]


@pytest.mark.parametrize("case", TWO_RANKS)
def test_averaged_weights_go_in_and_come_out_bit_for_bit(two_ranks: dict[str, Any], case: str) -> None:
    for found in two_ranks[case]:
        # fp32 recursion against a float64 sum of weights below 4: a few units in the last place.
        assert found["average_error"] <= 2e-6
        assert found["proxy_error"] == 0.0
        assert found["weights_after_proxy"]


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR_RANKS)
def test_four_ranks(tmp_path: Path, case: str) -> None:
    (found,) = run(tmp_path, 4, (case,)).values()
    check_every_version_comes_back(found)
    check_logprobs_are_those_of_their_time(found)
    assert all(rank["weights_after_proxy"] for rank in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (2, "moe:tp2:bf16"),
        (2, "moe:ep2:bf16:distributed"),
        (2, "moe:ep2:bf16"),
        (2, "moe:pp2:bf16:distributed"),
        (4, FOUR_RANKS[0]),
        (4, FOUR_RANKS[1]),
    ],
)
def test_fifty_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, case: str) -> None:
    """Each of fifty versions from each other, by differences and by copies: over 5000 walks there and back."""
    monkeypatch.setenv("OLD_LOGITS_VERSIONS", "50")
    (found,) = run(tmp_path, ranks, (case,), timeout_s=850).values()
    check_every_version_comes_back(found, versions=50)
    check_logprobs_are_those_of_their_time(found)
