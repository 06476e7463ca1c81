"""Plans of the published models without their machines: counts, coverage, placement, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_async.config import ConfigError, LayoutConfig, check, from_dict, load
from megatron_async.config.estimate import GIB, memory_on_stage, parameters_of
from megatron_async.config.hf import read_shape
from megatron_async.config.placement import place, placement_problems
from megatron_async.config.plan import budgets, changed_share, engine_budget, publish_bytes, trainer_budget
from megatron_async.engine import platform
from megatron_async.engine.hf_config import HFConfig
from megatron_async.engine.hf_weights import NameTable
from megatron_async.planning import fake_world
from megatron_async.planning.coverage import Coverage
from megatron_async.planning.survey import survey
from tests.unit.configs import make_checkpoint, write_config
from tools import plan_cluster

MODELS = Path(__file__).resolve().parents[2] / "recipes" / "models"

PUBLISHED = {  # model: (parameters, tensors in the published index); sizes in bf16 are twice the parameters
    "qwen3_30b_a3b": (30_532_122_624, 18_867),
    "qwen3_30b_a3b_base": (30_532_122_624, 18_867),
    "qwen3_235b_a22b": (235_093_634_560, 36_945),
    "qwen3_4b": (4_022_468_096, 398),
}


def make_config(model: str | Path = MODELS / "qwen3_30b_a3b", **sections):
    return from_dict(
        {"name": "plan", "model": {"path": str(model)}, "rollout": {"max_tokens": 4096}, **sections}
    )


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_counts(model):
    parameters, tensors = PUBLISHED[model]
    table = NameTable(HFConfig.from_pretrained(MODELS / model))
    assert parameters_of(read_shape(MODELS / model)).total == parameters
    assert sum(row.numel for row in table.rows) == parameters
    assert len(table.rows) == len(table.by_name) == tensors


def published_names(raw: dict) -> set[str]:
    """Tensor names as the checkpoints on the hub spell them, written out without the engine's table."""
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    names |= set() if raw["tie_word_embeddings"] else {"lm_head.weight"}
    mlp = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    if "num_experts" in raw:
        experts = range(raw["num_experts"])
        mlp = ["mlp.gate"] + [f"mlp.experts.{e}.{p}_proj" for e in experts for p in ("gate", "up", "down")]
    attention = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts = [*mlp, *attention, "input_layernorm", "post_attention_layernorm"]
    return names | {f"model.layers.{i}.{p}.weight" for i in range(raw["num_hidden_layers"]) for p in parts}


@pytest.mark.parametrize("model", PUBLISHED)
def test_names_are_those_of_the_published_index(model):
    raw = json.loads((MODELS / model / "config.json").read_text())
    table = NameTable(HFConfig.from_pretrained(MODELS / model))
    assert set(table.by_name) == published_names(raw)


LAYOUTS = [
    ("qwen3_4b", {"world_size": 8, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}, 8),
    pytest.param(
        "qwen3_30b_a3b",
        {"world_size": 16, "tensor_model_parallel_size": 4, "expert_model_parallel_size": 8},
        8,
        marks=pytest.mark.slow,
    ),
    (
        "qwen3_30b_a3b",
        {
            "world_size": 8,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
        },
        8,
    ),
    pytest.param(
        "qwen3_235b_a22b",
        {"world_size": 128, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8},
        16,
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("model", "layout", "distinct"), LAYOUTS)
def test_ranks_hold_every_tensor_of_the_checkpoint_exactly_once(model, layout, distinct):
    """Every distinct rank built for real on the meta device; a problem would also be a wrong estimate of its share."""
    result = survey(make_config(MODELS / model, layout=layout, batch={"groups": 64}))
    assert result.problems == ()
    assert (result.elements, result.tensors) == PUBLISHED[model]
    assert len(result.shares) == distinct
    assert sum(share.ranks for share in result.shares) == layout["world_size"]


def test_uneven_mix_of_dense_and_expert_layers_is_covered_too(tmp_path):
    tiny = make_checkpoint(tmp_path / "tiny")
    shape = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**shape, "mlp_only_layers": [0]}))
    layout = {"world_size": 4, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    result = survey(make_config(tiny, layout=layout))
    assert result.problems == ()
    assert result.elements == parameters_of(read_shape(tiny)).total


def test_coverage_finds_a_hole_an_overlap_and_a_missing_replica(tmp_path):
    hf = HFConfig.from_pretrained(make_checkpoint(tmp_path / "tiny"))
    table = NameTable(hf)
    layout = LayoutConfig(world_size=2, tensor_model_parallel_size=2, expert_tensor_parallel_size=2)
    halves = {row.hf_name: _halves(row) for row in table.rows}
    whole = [(name, index) for name, indices in halves.items() for index in indices]
    norm, query = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"

    def problems(pieces: list, ranks: int = 1) -> str:
        coverage = Coverage(table, layout)
        coverage.add([(name, i) for name, i in pieces if _replicated(table, name)], ranks * 2)
        coverage.add([(name, i) for name, i in pieces if not _replicated(table, name)], ranks)
        return "\n".join(coverage.problems())

    assert problems(whole) == ""
    missing = [piece for piece in whole if piece != (query, halves[query][1])]
    assert f"{query}: the ranks' rectangles hold 2,048 of 4,096 elements" in problems(missing)
    shifted = [*missing, (query, ((16, 48), (0, 64)))]
    assert "overlap" in problems(shifted)
    assert "is held by 4 rank(s), the layout makes 2" in problems([(norm, halves[norm][0]), *whole], 2)


def _replicated(table: NameTable, name: str) -> bool:
    return table.by_name[name].shard_axis is None


def _halves(row) -> list:
    index = [(0, n) for n in row.shape]
    if row.shard_axis is None:
        return [tuple(index)]
    middle = row.shape[row.shard_axis] // 2
    parts = []
    for bounds in ((0, middle), (middle, row.shape[row.shard_axis])):
        part = list(index)
        part[row.shard_axis] = bounds
        parts.append(tuple(part))
    return parts


def test_the_fake_world_leaves_no_group_and_refuses_a_rank_outside():
    import torch.distributed as dist

    layout = LayoutConfig(world_size=4, tensor_model_parallel_size=2)
    with fake_world.rank_of(layout, 3) as shard:
        assert (shard.tensor, dist.get_rank(), dist.get_world_size()) == (1, 3, 4)
        with pytest.raises(fake_world.PlanningError, match="belongs to a process group already"):
            with fake_world.rank_of(layout, 0):
                pass
    assert not dist.is_initialized()
    with pytest.raises(fake_world.PlanningError, match="rank 4 is not in a world of 4"):
        with fake_world.rank_of(layout, 4):
            pass
    assert platform.setup().device.type != "meta"


def test_a_rank_of_the_30b_by_hand():
    """One rank of EP=8, bf16: weights, fp32 gradients, 12 bytes of optimiser over the ranks that share them."""
    config = make_config(
        layout={"world_size": 16, "expert_model_parallel_size": 8}, trainer={"micro_batch_tokens": 4096}
    )
    held = memory_on_stage(read_shape(config.model.path), config, 0)
    experts = 28_991_029_248 // 8
    dense = 30_532_122_624 - 28_991_029_248
    assert held.weights == 2 * (experts + dense)
    assert held.gradients == 4 * (experts + dense)
    assert held.optimizer == 12 * (dense // 16 + experts // 2)
    assert publish_bytes(read_shape(config.model.path), config) == 61_064_245_248


def test_engine_memory_by_hand():
    config = make_config(engines={"tensor_parallel_size": 8, "max_total_tokens": 100_000})
    needs = dict(engine_budget(read_shape(config.model.path), config).needs)
    assert needs["weights"] == 61_064_245_248 / 8
    # Keys and values, 48 layers, 4 heads over 8 ranks: one head on each.
    assert needs["KV of 100,000 tokens"] == 2 * 48 * 1 * 128 * 2 * 100_000


def test_what_does_not_fit_is_refused_with_the_arithmetic():
    sections = {
        "layout": {"world_size": 8, "expert_model_parallel_size": 8},
        "trainer": {"micro_batch_tokens": 32768},
        "cluster": {"device_memory_gib": 80},
    }
    config = make_config(**sections)
    with pytest.raises(ConfigError) as refused:
        check(config, needs_weights=False)
    text = str(refused.value)
    assert re.search(
        r"trainer rank does not fit, [\d.]+ GiB too much: weights 9\.62 GiB \+ gradients 19\.24 GiB", text
    )
    assert "of 72.00 GiB (80 GiB less 10%); set trainer.recompute" in text
    sections["cluster"]["device_memory_gib"] = 0
    assert check(make_config(**sections), needs_weights=False) is not None, "unknown memory refuses nothing"


def test_recomputation_and_expert_parallel_save_what_they_say():
    shape = read_shape(MODELS / "qwen3_30b_a3b")
    long = {"micro_batch_tokens": 32768}
    plain = make_config(layout={"world_size": 8, "expert_model_parallel_size": 8}, trainer=long)
    saved = make_config(
        layout={"world_size": 8, "expert_model_parallel_size": 8}, trainer={**long, "recompute": True}
    )
    needs = [dict(trainer_budget(shape, config, 0).needs)["activations"] for config in (plain, saved)]
    # Every layer keeps its input alone; the last one is made again while the logits are gone.
    assert needs[1] == 48 * 32768 * 2048 * 2
    assert needs[1] < needs[0] / 10


@pytest.mark.parametrize(
    ("lr", "share"), [(1e-7, 0.042), (1e-6, 0.042), (5e-6, 0.15), (1e-4, 0.87), (1.0, 1.0)]
)
def test_changed_share_meets_the_measured_points(lr, share):
    assert changed_share(lr) == pytest.approx(share)


def test_histories_cost_device_and_host_memory():
    shape = read_shape(MODELS / "qwen3_4b")
    config = make_config(
        MODELS / "qwen3_4b",
        objective={"anchor": "snapshot"},
        old_logits={"source": "snapshot_full"},
        rollout={"max_tokens": 4096, "max_staleness": 3},
        cluster={"host_memory_gib": 30},
        checkpoint={"asynchronous": False},
    )
    host = budgets(shape, config)[-1]
    assert host.total == (3 + 3) * 2 * 4_022_468_096
    assert not host.fits
    with pytest.raises(ConfigError, match=r"machine with trainer ranks does not fit, 14\.95 GiB too much"):
        check(config, needs_weights=False)


def test_background_saves_cost_a_copy_in_host_memory():
    shape = read_shape(MODELS / "qwen3_4b")
    never, often = (
        budgets(shape, make_config(MODELS / "qwen3_4b", checkpoint={"every": every}))[-1] for every in (0, 5)
    )
    assert often.total - never.total == 14 * 4_022_468_096, "bf16 weights, fp32 masters and two moments"
    assert "checkpoint copies of 1 rank(s) * 52.45 GiB" in often.text()


def test_every_extra_model_has_its_place_in_the_sum():
    """Reference and critic on the trainer's ranks, the dedicated model on ranks of its own."""
    shape = read_shape(MODELS / "qwen3_4b")
    plain = trainer_budget(shape, make_config(MODELS / "qwen3_4b", objective={"name": "ppo"}), 0)
    weights = dict(plain.needs)["weights"]
    sections = {
        "reference": {"objective": {"name": "ppo", "kl_coefficient": 1e-3}},
        "critic": {
            "objective": {"name": "ppo"},
            "advantage": {"name": "gae", "drop_zero_variance_groups": False},
        },
        "history: shadow": {"objective": {"anchor": "dedicated"}, "snapshots": {"shadow": True}},
        "no shadow": {"objective": {"anchor": "dedicated"}},
        "average": {"objective": {"anchor": "ewma"}},
    }
    grown = {
        name: trainer_budget(shape, make_config(MODELS / "qwen3_4b", **changes), 0).total - plain.total
        for name, changes in sections.items()
    }
    assert grown["reference"] == grown["history: shadow"] == weights
    assert grown["no shadow"] == 0, "bf16 weights have masters to take the difference in"
    assert grown["average"] == 2 * weights
    assert 3 * weights < grown["critic"] < 9 * weights, "18 bytes a parameter less what is frozen"
    dedicated = budgets(shape, make_config(MODELS / "qwen3_4b", **sections["history: shadow"]))[1]
    assert dedicated.what == "dedicated rank"
    assert dedicated.total == 2 * weights + 4096 * 2 * 151936


def test_placement_gives_every_process_its_own_devices():
    config = make_config(
        layout={"world_size": 16, "expert_model_parallel_size": 8},
        trainer={"nodes": 2},
        engines={"count": 4, "tensor_parallel_size": 4},
        cluster={"devices_per_node": 8, "engine_nodes": 2},
    )
    nodes = place(config)
    assert [node.trainer_ranks for node in nodes] == [8, 8, 0, 0]
    assert nodes[1].trainer_devices == tuple(range(8))
    assert [(engine.index, engine.devices) for engine in nodes[3].engines] == [
        (2, (0, 1, 2, 3)),
        (3, (4, 5, 6, 7)),
    ]
    assert [node.leads for node in nodes] == [True, False, False, False]
    assert placement_problems(config) == []


def test_engines_beside_the_trainer_take_the_devices_after_its_ranks():
    sections = {
        "layout": {"world_size": 4, "expert_model_parallel_size": 4},
        "engines": {"count": 2, "tensor_parallel_size": 2},
        "cluster": {"devices_per_node": 8},
    }
    (node,) = place(make_config(**sections))
    assert [engine.devices for engine in node.engines] == [(4, 5), (6, 7)]
    sections["engines"]["count"] = 3
    (problem,) = placement_problems(make_config(**sections))
    assert (
        "machine 0 has 8 accelerators, but needs 4 trainer rank(s) + 3 engine(s) * tensor 2 = 10" in problem
    )
    sections["cluster"]["engine_nodes"] = 2
    (problem,) = placement_problems(make_config(**sections))
    assert "3 engines cannot be spread evenly over cluster.engine_nodes = 2" in problem


def test_the_tool_prints_the_plan_and_refuses(tmp_path, capsys):
    tiny = make_checkpoint(tmp_path / "tiny")
    file = tmp_path / "run.yaml"
    file.write_text(f"name: t\nmodel: {{path: {tiny}}}\nrollout: {{max_tokens: 2048}}\n")
    layout = ["--set", "layout.world_size=4", "--set", "layout.expert_model_parallel_size=4"]
    assert plan_cluster.main(["--config", str(file), *layout]) == 0
    printed = capsys.readouterr().out
    assert "Ranks built on the meta device (4 distinct of 4)" in printed
    assert "every tensor exactly once" in printed
    small = [*layout, "--set", f"cluster.device_memory_gib={1 / GIB}", "--ranks", "none"]
    assert plan_cluster.main(["--config", str(file), *small]) == 2
    assert "trainer rank does not fit" in capsys.readouterr().err
    assert plan_cluster.main(["--config", str(file), "--set", "layout.world_size=3", *layout[2:]]) == 2
    assert "world_size 3 is not a multiple of expert 4" in capsys.readouterr().err


def test_publishing_holds_no_more_than_the_model(tmp_path: Path) -> None:
    """The export's bucket and the publisher's, each twice; of a tiny model each is the whole model."""
    config = load(write_config(tmp_path))
    shape = read_shape(config.model.path)
    assert shape is not None
    assert dict(trainer_budget(shape, config, 0).needs)["publishing"] == 4 * publish_bytes(shape, config)
