"""The batches and tables of the tools that measure sources of old log-probs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_async.bank import Bank
from megatron_async.engine.sequences import Sequence
from megatron_async.errors import UserError
from megatron_async.observe.timeline import Interval
from tests.bank_support import collect
from tests.unit.configs import write_config
from tools.benchmark_live_sources import Overlap
from tools.benchmark_snapshot import sampled_by_now
from tools.lag_experiment import by_gap, rows, table
from tools.snapshot_batches import Recipe, recorded, synthetic


@pytest.mark.parametrize("spans", [1.0, 1.1, 1.8, 3.0])
def test_synthetic_batches_have_the_wished_staleness(spans: float) -> None:
    recipe = Recipe(trajectories=400, tokens=64, gap=3, spans=spans, vocabulary=100)
    batch = synthetic(recipe, step=9)
    gaps = [s.arrays["version_gap"][s.arrays["action_mask"]] for s in batch]
    assert {int(g) for held in gaps for g in held} == {0, 1, 2, 3}
    # Versions only grow along a trajectory, and follow one another.
    assert all(set(np.diff(held)) <= {0, -1} for held in gaps)
    # The mean of 400 Bernoulli draws lies within 4 standard errors.
    assert np.mean([len(set(held)) for held in gaps]) == pytest.approx(spans, abs=4 * 0.5 / 20)


def test_no_token_is_older_than_the_run() -> None:
    recipe = Recipe(trajectories=50, tokens=32, gap=3, spans=2.0, vocabulary=100)
    for step in range(4):
        assert max(s.arrays["version_gap"].max() for s in synthetic(recipe, step)) == step


def test_the_same_step_gives_the_same_batch() -> None:
    recipe = Recipe(trajectories=5, tokens=32, gap=2, spans=1.5, vocabulary=100)
    first, again, other = synthetic(recipe, 4), synthetic(recipe, 4), synthetic(recipe, 5)
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0].token_ids, other[0].token_ids)


def make_run(tmp_path: Path, steps: int) -> Path:
    """A run's folder with a bank: step s trained on two trajectories, of versions max(s - 1, 0)."""
    file = write_config(tmp_path)
    folder = tmp_path / "runs" / "test"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(yaml.safe_load(file.read_text())))
    with Bank.open(f"sqlite:///{folder / 'bank.sqlite'}") as bank:
        for step in range(steps):
            for i in range(2):
                collect(bank, f"{step}.{i}", f"g{step}", version=max(step - 1, 0))
            assert bank.take_batch(step, 1, 2, 0) is not None
            bank.record_version(step + 1, step, step)
            bank.commit_step(step, step, step + 1)
    return folder


def test_recorded_batches_keep_the_gaps_they_had(tmp_path: Path) -> None:
    batches = recorded(make_run(tmp_path, 3))
    gaps = [[int(s.arrays["version_gap"].max()) for s in batch] for batch in batches]
    assert gaps == [[0, 0], [1, 1], [1, 1]]
    assert all(s.arrays["action_mask"].sum() == 2 for batch in batches for s in batch)


def test_a_run_without_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no trained batch"):
        recorded(make_run(tmp_path, 0))


def metrics(step_tokens: dict[str, float], passing: float) -> dict[str, float]:
    row: dict[str, float] = {}
    for label, tokens in step_tokens.items():
        row[f"objective/tokens/{label}"] = tokens
        row[f"objective/log_discrepancy/mean_abs/{label}"] = 1e-6
        row[f"objective/log_staleness/mean_abs/{label}"] = 0.1
        row[f"objective/masked/{label}"] = 1 - passing
        row[f"objective/active/{label}"] = passing / 2
    return row


def test_figures_by_gap_are_means_over_tokens() -> None:
    found = by_gap([metrics({"gap_0": 10}, 1.0), metrics({"gap_0": 30, "gap_8+": 5}, 0.6)])
    assert found.keys() == {0, 8}
    assert found[0]["tokens"] == 40
    assert 1 - found[0]["masked"] == pytest.approx((10 * 1.0 + 30 * 0.6) / 40)
    assert "0.700" in table({"start": found})


def test_only_the_exact_anchor_has_goals() -> None:
    from argparse import Namespace

    found = by_gap([metrics({"gap_0": 10, "gap_1": 10}, 1.0)])
    of = Namespace(lr=1e-5, steps=1, lag=9)
    made = {row.figure: row for row in rows({"start": found, "snapshot": found}, of)}
    assert made["mask_pass_by_gap_start"].goal == ""
    assert made["mask_pass_by_gap_snapshot"].passed
    assert made["exact_noise_growth"].value == 1.0
    assert made["active_by_gap_snapshot"].value == [0.5, 0.5]
    assert made["log_discrepancy_by_gap_start"].value == [1e-6, 1e-6]


def test_what_lies_under_the_actors_work_is_hidden() -> None:
    """Scoring from 10 to 14 s; an update until 11 s and waiting from 12 to 13 s; the first steps do not count."""
    rows = [
        ("scorer", "score", 4, 10.0, 14.0),
        ("trainer", "update", 4, 9.0, 11.0),
        ("trainer", "wait_batch", 5, 12.0, 13.0),
        ("scorer", "follow", 4, 9.0, 10.0),
        ("scorer", "score", 0, 0.0, 8.0),
    ]
    assert Overlap.of(Interval(*row) for row in rows) == Overlap(scoring=4.0, under_update=1.0, under_waiting=1.0)


def test_an_interruption_sees_what_was_sampled_so_far() -> None:
    """Trained at version 9, seen at version 7, two steps before: versions 6 and 7 are there, 8 is still to come."""
    versions = np.array([-1, 6, 7, -1, 8, 8])
    mask = versions >= 0
    arrays = {"action_mask": mask, "version_gap": np.where(mask, 9 - versions, 0), "kv_mismatch": ~mask}
    seen = sampled_by_now(Sequence(np.arange(6, dtype=np.int32), 0.7, arrays), behind=2)
    assert seen is not None
    assert seen.token_ids.tolist() == [0, 1, 2, 3]
    assert seen.arrays["version_gap"].tolist() == [0, 1, 0, 0]
    assert seen.temperature == 0.7
    assert sampled_by_now(Sequence(np.arange(6, dtype=np.int32), 1.0, arrays), behind=4) is None
