"""What the asynchrony benchmark says when a mode does not go on, and how it counts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_async.bank import Bank
from megatron_async.config.schema import ModelConfig, RunConfig
from megatron_async.observe import StatusWriter
from megatron_async.supervise import Part, PartFailed, python_module
from tools.benchmark_async import Measured, Watch, rows


def test_a_mode_that_stands_still_says_where(tmp_path: Path) -> None:
    config = RunConfig(name="run", run_dir=str(tmp_path), model=ModelConfig(path="nowhere"), steps=16)
    status = StatusWriter(config.run_path, "rollout")
    status.set("running", "the trainer: 64 trajectories wait")
    with Bank.open(config.bank_url) as bank:
        Watch("asynchronous", config, [], deadline_s=1000.0).check(bank, 3)  # there is time
        with pytest.raises(TimeoutError, match="3 of 16 steps after 0 s.* 0 of 16 groups") as caught:
            Watch("asynchronous", config, [], deadline_s=0.0).check(bank, 3)
    assert "the rollout is running, waits for the trainer: 64 trajectories wait" in str(caught.value)


def test_a_rollout_that_ends_ends_the_benchmark(tmp_path: Path) -> None:
    config = RunConfig(name="run", run_dir=str(tmp_path), model=ModelConfig(path="nowhere"), steps=16)
    part = Part("rollout", python_module("megatron_async", "rollout", "--config", "nowhere"), tmp_path / "log")
    part.start()
    assert part._process is not None
    part._process.wait(timeout=120)
    config.run_path.mkdir()
    with Bank.open(config.bank_url) as bank, pytest.raises(PartFailed, match="nowhere"):
        Watch("asynchronous", config, [part], deadline_s=1000.0).check(bank, 0)


def test_speed_ups_are_held_against_the_slower_side() -> None:
    """Rollout alone 100 s, 10 updates of 8 s: the bound is 100 s. 250 s synchronous, 105 s asynchronous."""
    found = {
        mode: Measured(seconds, 5000, 100 / seconds, 80 / seconds)
        for mode, seconds in (("synchronous", 250.0), ("one step off", 140.0), ("asynchronous", 105.0))
    }
    values = speeds(found)
    assert values["speedup_over_bound"] == pytest.approx(100 / 105, abs=1e-3)
    assert values["speedup_bound"] == pytest.approx(2.5)
    assert values["speedup_asynchronous"] == pytest.approx(250 / 105, abs=1e-2)


def test_a_mode_that_leaves_its_long_episodes_unfinished_is_not_faster_for_it() -> None:
    found = {"synchronous": Measured(250.0, 5000), "one step off": Measured(140.0, 5000)}
    whole, short = (speeds(found | {"asynchronous": Measured(100.0, tokens)}) for tokens in (5000, 4500))
    assert short["speedup_over_bound"] == pytest.approx(0.9 * whole["speedup_over_bound"])


def speeds(found: dict[str, Measured]) -> dict[str, Any]:
    alone = Measured(100.0, 5000, 1.0)
    made = rows(found, alone, bound=alone.rate, update_s=8.0, args=argparse.Namespace(steps=10))
    assert [row.passed for row in made if row.figure == "speedup_over_bound"] == [True]
    return {row.figure: row.value for row in made}
