"""A critic on ranks of its own: what is refused, where the ranks live, what they need, how they are started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import ConfigError, LayoutConfig, RunConfig, check, dump, from_dict, load
from megatron_async.config.describe import describe
from megatron_async.config.hf import read_shape
from megatron_async.config.loader import parse_yaml
from megatron_async.config.placement import place, placement_problems, placement_text
from megatron_async.config.plan import budgets, critic_budget, memory_problems, trainer_budget
from megatron_async.launch import critic_command, training_parts
from megatron_async.observe import RunFiles
from tests.unit.configs import write_config

GAE = ["advantage.name=gae", "advantage.drop_zero_variance_groups=false", "critic.warmup_steps=1"]
TENSOR = ["critic.layout.world_size=4", "critic.layout.tensor_model_parallel_size=2"]


def configured(tmp_path: Path, *overrides: str, **sections: Any) -> RunConfig:
    return load(write_config(tmp_path, **sections), [*GAE, *overrides])


def own(tmp_path: Path, *overrides: str, **sections: Any) -> RunConfig:
    return configured(tmp_path, "critic.ranks=own", *overrides, **sections)


def test_its_layout_is_the_actors_unless_it_is_given(tmp_path: Path) -> None:
    actor = ["layout.world_size=2", "layout.tensor_model_parallel_size=2"]
    assert own(tmp_path, *actor).critic_layout == own(tmp_path, *actor).layout
    layout = own(tmp_path, *actor, *TENSOR).critic_layout
    assert layout == LayoutConfig(world_size=4, tensor_model_parallel_size=2, sequence_parallel=True)
    shared = configured(tmp_path, *actor)
    assert shared.critic.layout is None and shared.critic_layout == shared.layout


@pytest.mark.parametrize("overrides", [(), ("critic.ranks=own",), ("critic.ranks=own", *TENSOR)])
def test_what_is_written_down_is_read_back(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = configured(tmp_path, *overrides)
    assert from_dict(parse_yaml(dump(config), "")) == config


def test_a_section_that_is_null_can_be_filled_by_an_override(tmp_path: Path) -> None:
    config = own(tmp_path, "critic.layout.world_size=3", critic={"layout": None})
    assert config.critic_layout.world_size == 3
    with pytest.raises(ConfigError, match=r"critic\.layout\.worldsize: unknown key"):
        own(tmp_path, "critic.layout.worldsize=3")


REFUSED = [
    (["critic.layout.world_size=2"], "critic.layout: the critic shares the actor's ranks"),
    (["critic.ranks=own", "critic.layout.world_size=0"], "critic.layout.world_size: 0 is not at least 1"),
    (
        ["critic.ranks=own", "critic.layout.world_size=3", "critic.layout.tensor_model_parallel_size=2"],
        "critic.layout: world_size 3 is not a multiple of tensor 2",
    ),
    (
        ["critic.ranks=own", "critic.layout.world_size=4", "critic.layout.tensor_model_parallel_size=4"],
        "critic.layout.tensor_model_parallel_size: num_key_value_heads = 2 is not divisible by 4",
    ),
    (
        ["critic.ranks=own", "critic.layout.world_size=3", "critic.layout.expert_model_parallel_size=3"],
        "critic.layout.expert_model_parallel_size: num_experts = 8 is not divisible by 3",
    ),
    (
        ["critic.ranks=own", "layout.context_parallel_size=2", "layout.world_size=2",
         "trainer.micro_batch_tokens=1024", "critic.layout.world_size=1"],
        r"context parallel 1 \(critic.layout\) = 1024 tokens do not hold one trajectory",
    ),
    (
        ["critic.ranks=own", "advantage.name=grpo"],
        r"critic.ranks: own would start 1 rank\(s\) that nothing asks, since advantage.name: grpo has no critic",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "problem"), REFUSED)
def test_what_cannot_be_is_refused(tmp_path: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(configured(tmp_path, *overrides), needs_weights=False)


def test_what_can_be_is_not(tmp_path: Path) -> None:
    assert isinstance(check(own(tmp_path, *TENSOR), needs_weights=False), list)


def test_its_ranks_have_accelerators_of_their_own_on_the_first_machine(tmp_path: Path) -> None:
    machines = ["trainer.nodes=2", "layout.world_size=4", "cluster.devices_per_node=7", "batch.groups=16"]
    first, second = place(own(tmp_path, *TENSOR, *machines))
    assert (first.trainer_devices, first.critic_devices) == ((0, 1), (2, 3, 4, 5))
    assert [engine.devices for engine in first.engines] == [(6,)]
    assert (second.critic_ranks, second.critic_devices, second.devices) == (0, (), 2)
    assert "critic ranks 0-3 on devices 2-5" in placement_text(own(tmp_path, *TENSOR, *machines))[0]
    (problem,) = placement_problems(own(tmp_path, *TENSOR, *machines, "cluster.devices_per_node=6"))
    assert "2 trainer rank(s) + 4 rank(s) of the critic + 1 engine(s) * tensor 1 = 7" in problem


def test_a_dedicated_old_logit_model_comes_before_it(tmp_path: Path) -> None:
    (node,) = place(own(tmp_path, *TENSOR, "objective.anchor=dedicated", "cluster.devices_per_node=8"))
    assert (node.scorer_devices, node.critic_devices) == ((1,), (2, 3, 4, 5))


def test_its_memory_is_off_the_trainers_ranks_and_on_its_own(tmp_path: Path) -> None:
    shared, apart = configured(tmp_path), own(tmp_path)
    shape = read_shape(shared.model.path)
    assert shape is not None
    before, after = dict(trainer_budget(shape, shared, 0).needs), dict(trainer_budget(shape, apart, 0).needs)
    on_its_own = dict(critic_budget(shape, apart, 0).needs)
    assert after["critic"] == 0
    states = sum(on_its_own[name] for name in ("weights", "gradients", "optimiser"))
    assert states == before["critic"] > 0
    assert on_its_own["activations"] > 0
    halved = dict(critic_budget(shape, own(tmp_path, *TENSOR), 0).needs)
    assert halved["weights"] < on_its_own["weights"]
    assert [b.what for b in budgets(shape, apart)] == [
        "trainer rank", "critic rank", "engine rank (1 of 1)", "machine with trainer ranks"
    ]  # fmt: skip
    text = describe(apart)
    assert "critic    1 rank(s) of its own on the first machine" in text
    assert "critic rank: weights" in text and "of 1 critic rank(s) *" in text


def test_a_critic_that_does_not_fit_its_ranks_is_refused(tmp_path: Path) -> None:
    shape = read_shape(own(tmp_path).model.path)
    assert shape is not None
    fits = own(tmp_path, "layout.world_size=4", "layout.expert_model_parallel_size=4", "critic.layout.world_size=1")
    need = critic_budget(shape, fits, 0).total / 2**30
    tight = own(
        tmp_path, "layout.world_size=4", "layout.expert_model_parallel_size=4", "critic.layout.world_size=1",
        "cluster.headroom=0", f"cluster.device_memory_gib={need * 0.99}",
    )  # fmt: skip
    problems = [problem for problem in memory_problems(shape, tight) if problem.startswith("critic rank")]
    assert len(problems) == 1 and "raise a parallel size of critic.layout" in problems[0]


def test_launch_starts_it_with_the_trainer_on_its_devices(tmp_path: Path) -> None:
    config = own(tmp_path, *TENSOR, "cluster.devices_per_node=8")
    files = RunFiles(config.run_path)
    critic, trainer = training_parts(config, files, place(config)[0])
    assert (critic.name, trainer.name) == ("critic", "trainer")
    assert critic.argv == critic_command(config, str(files.config))
    assert critic.argv[critic.argv.index("--nproc-per-node") + 1] == "4"
    assert critic.argv[-4:] == ["megatron_async", "critic", "--config", str(files.config)]
    assert critic._environment["CUDA_VISIBLE_DEVICES"] == "1,2,3,4"
    assert [part.name for part in training_parts(configured(tmp_path), files, place(config)[0])] == ["trainer"]
