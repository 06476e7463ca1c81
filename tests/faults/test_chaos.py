"""A short run under fire: trainer, rollout and engine are killed or paused, and nothing is lost or done twice.

The engines are scripted and the trainer has no model; rollout, bank, environment and supervision are the product's.
Real trainer ranks, SGLang servers, PostgreSQL and a full disk: `python -m tests.faults.chaos`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.faults.chaos_run import Plan, Run, Verdict, scripted, write_config
from tests.faults.chaos_trainer import WEIGHTS

STEPS = 16


def check_verdict(verdict: Verdict, run: Path) -> None:
    assert verdict.row() | {"lost": [], "doubled": [], "orphans": [], "problems": [], "hangs": 0} == verdict.row()
    assert verdict.hits == {"rollout": 1, "stand_in": 1, "engine": 1}
    assert verdict.steps == STEPS and verdict.findings.trained == 4 * STEPS
    # What is in the weights, by their own account: every step once, no trajectory twice.
    trained = json.loads((run / WEIGHTS).read_text())["trained"]
    assert len(trained) == STEPS
    assert len({name for step in trained for name in step}) == 4 * STEPS


def test_a_run_under_fire_loses_nothing(smallest_checkpoint: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, smallest_checkpoint, steps=STEPS, engines={"count": 1})
    kinds = ("rollout", "stand_in", "engine")
    plan = Plan(kinds, scripted(stand_in=True), hits=3, seed=3, in_turn=True, calm_s=(0.0, 0.3))
    verdict = Run(config, plan).play()
    check_verdict(verdict, tmp_path / "run")
    assert verdict.max_gap <= verdict.bound
