"""Where the ranks of a dedicated old-logit model live."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_async.config import load
from megatron_async.config.placement import place, placement_problems, placement_text
from megatron_async.config.schema import RunConfig
from megatron_async.supervise import Part, supervised, watch
from tests.unit.configs import write_config


def configured(tmp_path: Path, anchor: str, devices: int) -> RunConfig:
    overrides = ["layout.world_size=2", "layout.expert_model_parallel_size=2", "engines.count=2"]
    return load(
        write_config(tmp_path),
        [*overrides, f"objective.anchor={anchor}", f"cluster.devices_per_node={devices}"],
    )


def test_scorer_ranks_have_accelerators_of_their_own_between_trainer_and_engines(tmp_path: Path) -> None:
    (node,) = place(configured(tmp_path, "dedicated", 6))
    assert node.trainer_devices == (0, 1)
    assert node.scorer_devices == (2, 3)
    assert [engine.devices for engine in node.engines] == [(4,), (5,)]
    assert (
        "dedicated old-logit model on devices 2-3" in placement_text(configured(tmp_path, "dedicated", 6))[0]
    )


def test_other_sources_need_none(tmp_path: Path) -> None:
    (node,) = place(configured(tmp_path, "snapshot", 4))
    assert node.scorer_devices == ()
    assert [engine.devices for engine in node.engines] == [(2,), (3,)]


def test_too_few_accelerators_are_refused_with_the_arithmetic(tmp_path: Path) -> None:
    (problem,) = placement_problems(configured(tmp_path, "dedicated", 5))
    assert "2 trainer rank(s) + 2 rank(s) of the dedicated model + 2 engine(s) * tensor 1 = 6" in problem
    assert placement_problems(configured(tmp_path, "dedicated", 6)) == []


def test_a_part_gets_its_environment_on_top_of_ours(tmp_path: Path) -> None:
    script = "import os; assert os.environ['PATH']; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    part = Part(
        "part", [sys.executable, "-c", script], tmp_path / "part.log", {"CUDA_VISIBLE_DEVICES": "2,3"}
    )
    with supervised([part]):
        part.start()
        watch([part], lambda: part.poll() == 0)
    assert part.log_path.read_text() == "2,3\n"
