"""Cross-field checks: each refuses with the arithmetic in the message, before anything starts."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async.config import ConfigError, check, load, methods
from tests.unit.configs import MOE_SHAPE, make_checkpoint, write_config

ROOT = Path(__file__).resolve().parents[2]


def problems(tmp_path, *overrides: str, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        check(load(write_config(tmp_path), overrides), **options)
    return str(caught.value)


def warnings(tmp_path, *overrides: str) -> list[str]:
    return check(load(write_config(tmp_path), overrides))


@pytest.fixture
def every_anchor_built(monkeypatch):
    """As if `old_logits` provided every anchor, for rules that do not depend on it."""
    for name, anchor in methods.ANCHORS.items():
        monkeypatch.setitem(methods.ANCHORS, name, replace(anchor, built=True))


def test_a_sensible_configuration_passes(tmp_path):
    quiet = ["objective.name=ppo", "objective.anchor=rollout"]
    layout = [
        "layout.world_size=8",
        "layout.tensor_model_parallel_size=2",
        "layout.expert_model_parallel_size=4",
    ]
    assert warnings(tmp_path, *quiet, *layout) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [
                "layout.world_size=6",
                "layout.tensor_model_parallel_size=2",
                "layout.pipeline_model_parallel_size=2",
            ],
            [
                "world_size 6 is not a multiple of tensor 2 * pipeline 2 * context 1 = 4",
                "layout.world_size to 8",
            ],
        ),
        (
            ["layout.world_size=2", "layout.expert_model_parallel_size=4"],
            ["world_size 2 is not a multiple of expert 4 * expert-tensor 1 * pipeline 1 = 4", "to 4"],
        ),
        (["layout.world_size=0"], ["layout.world_size: 0 is not at least 1"]),
        (
            ["layout.world_size=4", "layout.tensor_model_parallel_size=4"],
            ["num_key_value_heads = 2 is not divisible by 4 (remainder 2)"],
        ),
        (
            ["layout.world_size=3", "layout.expert_model_parallel_size=3", "batch.groups=3"],
            ["num_experts = 8 is not divisible by 3 (remainder 2)"],
        ),
        (
            ["layout.world_size=3", "layout.pipeline_model_parallel_size=3", "batch.groups=3"],
            ["num_hidden_layers = 4 is not divisible by 3 stages * 1 chunks = 3"],
        ),
        (["layout.virtual_pipeline_model_parallel_size=2"], ["2 chunks on 1 pipeline stage(s)"]),
        (["layout.sequence_parallel=true"], ["needs tensor_model_parallel_size > 1"]),
        (
            ["layout.world_size=2", "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=false"],
            ["only with sequence parallel"],
        ),
        (["trainer.nodes=2", "layout.world_size=3"], ["2 node(s)", "layout.world_size is 3"]),
        (
            ["trainer.nproc_per_node=4", "layout.world_size=2"],
            ["1 node(s) * 4 processes = 4", "world_size is 2"],
        ),
        (
            ["layout.world_size=4", "batch.groups=3", "batch.group_size=2"],
            [
                "groups 3 * group_size 2 = 6 trajectories",
                "4 data-parallel ranks (remainder 2)",
                "batch.groups to 4",
            ],
        ),
        (
            ["trainer.micro_batch_tokens=1000"],
            ["1000 * context parallel 1 = 1000 tokens", "max_tokens = 2048"],
        ),
        (["rollout.max_tokens=5000", "trainer.micro_batch_tokens=8192"], ["max_position_embeddings = 4096"]),
        (["engines.max_total_tokens=1024"], ["a KV cache of 1024 tokens", "max_tokens = 2048"]),
        (["engines.tensor_parallel_size=3"], ["num_attention_heads = 4 is not divisible by 3"]),
        (["rollout.temperature=0"], ["rollout.temperature: 0.0 is not above 0"]),
        (["rollout.top_p=1.5"], ["outside (0, 1]"]),
        (["rollout.process=64"], ["rollout.process: 64 is outside 0 to 63"]),
        (["rollout.process=1", "objective.anchor=interrupt"], ["objective.anchor: interrupt, for which one process"]),
        (["rollout.process=1", "rollout.over_sampling=0.5"], ["only one process can tell"]),
        (["optimizer.lr=0"], ["optimizer.lr: 0.0 is not above 0"]),
        (["optimizer.adam_beta1=1.0"], ["optimizer.adam_beta1: 1.0 is outside [0, 1)"]),
        (["optimizer.min_lr=1.0"], ["min_lr: 1.0 is above optimizer.lr"]),
        (["name=a/b"], ["cannot name a folder"]),
        (["objective.mask_low=1.2"], ["window [1.2, 1.01] is empty"]),
        (["objective.mask_low=1.002"], ["does not hold 1"]),
        (["objective.dual_clip=0.5"], ["dual_clip: 0.5 is not above 1"]),
        (["objective.name=reinforce"], ["max_staleness: 1", "reinforce", "set rollout.max_staleness to 0"]),
        (["publish.every=4"], ["max_staleness: 1 is too small for publish.every = 4", "at least 3"]),
        (
            ["objective.name=ppo", "objective.anchor=start"],
            ["does not correct for them", "weight: discrepancy"],
        ),
        (["objective.anchor=linear", "old_logits.source=start"], ["set it to linear, or leave it out"]),
        (["batch.group_size=1", "batch.groups=4"], ["batch.group_size is 1; raise it", "running_mean"]),
        (["batch.group_size=1", "advantage.name=running_mean"], ["would drop every group"]),
        (
            [
                "batch.group_size=1",
                "advantage.name=running_mean",
                "advantage.drop_zero_variance_groups=false",
                "batch.max_filtered_groups=8",
            ],
            ["max_filtered_groups: 8 would filter every group"],
        ),
        (
            ["advantage.name=batch_mean", "batch.max_filtered_groups=8"],
            ["advantage.name: batch_mean learns from them too", "one of grpo, dr_grpo, rloo"],
        ),
        (["batch.max_filtered_groups=-1"], ["-1 is negative; 0 takes groups as they come"]),
        (
            [
                "objective={name: sat, options: {quantile_scope: microbatch}}",
                "layout.world_size=2",
                "layout.context_parallel_size=2",
            ],
            ["a micro-batch lies on 2 ranks", "set it to batch"],
        ),
    ],
)
def test_what_would_fail_later_is_refused_with_the_arithmetic(tmp_path, overrides, words):
    """Field bug 38, among others: a batch that ranks cannot share equally."""
    message = problems(tmp_path, *overrides)
    assert all(word in message for word in words), message


def test_dense_model_refuses_expert_parallel_and_needs_no_sequence_parallel(tmp_path):
    dense = {key: value for key, value in MOE_SHAPE.items() if "expert" not in key and "moe" not in key}
    path = make_checkpoint(tmp_path / "dense", {**dense, "model_type": "qwen3"})
    base = [f"model.path={path}", "layout.world_size=2"]
    assert "the model has no experts; set it to 1" in problems(
        tmp_path, *base, "layout.expert_model_parallel_size=2"
    )
    tensor = [*base, "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=false"]
    assert isinstance(warnings(tmp_path, *tensor), list)


def test_all_problems_are_reported_together(tmp_path):
    message = problems(tmp_path, "optimizer.lr=0", "rollout.top_p=2", "layout.world_size=0")
    assert message.startswith("3 problems")


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ([], "mask [0.99, 1.01] is within 2% of 1, but anchor start is not exact"),
        (["objective.mask_low=0.98", "objective.mask_high=1.02"], "mask [0.98, 1.02] is within 2% of 1"),
        ([], "the clip cannot act"),
        (["rollout.top_p=0.9"], "every ratio is biased"),
        (["rollout.top_k=50"], "every ratio is biased"),
        (["rollout.concurrency=9999"], "(max_staleness 1 + 1) * 128 = 256"),
        (["publish.pause_mode=in_place"], "retract keeps them exact"),
        (["trainer.nodes=2", "layout.world_size=2"], "PostgreSQL"),
        (["engines.routed_experts=true", "checkpoint.every=0"], "bank.keep resumable deletes nothing"),
    ],
)
def test_likely_mistakes_warn(tmp_path, overrides, word):
    assert any(word in warning for warning in warnings(tmp_path, *overrides)), warnings(tmp_path, *overrides)


@pytest.mark.usefixtures("every_anchor_built")
def test_exact_anchor_several_updates_or_a_wide_mask_are_silent(tmp_path):
    assert warnings(tmp_path, "objective.anchor=snapshot") == []
    wide = ["objective.mask_low=0.5", "objective.mask_high=2.0", "trainer.updates_per_batch=2"]
    assert warnings(tmp_path, *wide) == []


def test_a_checkpoint_that_cannot_be_used_is_described(tmp_path):
    path = make_checkpoint(tmp_path / "other")
    (path / "model.safetensors").unlink()
    assert "no *.safetensors file" in problems(tmp_path, f"model.path={path}")
    index = {"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model-00001.safetensors").write_bytes(b"")
    message = problems(tmp_path, f"model.path={path}")
    assert "model-00002.safetensors is missing" in message
    assert "model-00001" not in message
    (path / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in problems(tmp_path, f"model.path={path}")
    (path / "config.json").write_text("{}")
    assert "does not describe a decoder" in problems(tmp_path, f"model.path={path}")
    (path / "config.json").unlink()
    assert "config.json is missing" in problems(tmp_path, f"model.path={path}")
    assert "no such directory" in problems(tmp_path, "model.path=/nowhere/at/all")


def test_a_template_without_tools_is_refused(tmp_path):
    plain = make_checkpoint(tmp_path / "plain", template="{{ messages[0].content }}")
    assert "never mentions `tools`" in problems(tmp_path, f"model.path={plain}")
    (plain / "chat_template.jinja").unlink()
    assert "has no chat template" in problems(tmp_path, f"model.path={plain}")


def test_a_port_in_use_is_named_only_when_engines_are_started(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        message = problems(tmp_path, f"engines.base_port={port}", starts_engines=True)
        assert f"port(s) {port} on 127.0.0.1 are in use" in message
        assert isinstance(warnings(tmp_path, f"engines.base_port={port}"), list)
    assert "outside [1, 65535]" in problems(tmp_path, "engines.base_port=65535", "engines.count=2")


def test_weights_that_are_their_own_masters_need_a_shadow(tmp_path):
    changes = ("objective.anchor=snapshot", "snapshots.shadow=false")
    assert "set model.dtype: bfloat16, or snapshots.shadow: null" in problems(
        tmp_path, *changes, "model.dtype=float32"
    )
    assert "snapshots.shadow" not in problems(
        tmp_path, *changes, "model.dtype=bfloat16", "snapshots.device_bytes=-1"
    )


CPU_RECIPES = [
    path
    for path in sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))
    if not path.name.startswith("qwen3_")  # completed by their scripts and the real model's shape: test_recipes
]


@pytest.mark.parametrize("recipe", CPU_RECIPES, ids=lambda path: path.name)
def test_recipes_are_legal(tmp_path, recipe):
    """With a checkpoint of the recipe's kind in place, no recipe is refused."""
    path = make_checkpoint(tmp_path / "model")
    assert isinstance(check(load(recipe, [f"model.path={path}"])), list)


@pytest.mark.parametrize("anchor", sorted(methods.ANCHORS))
def test_an_anchor_is_refused_exactly_where_no_source_provides_it(tmp_path, anchor):
    """The table of the configuration and the builders of `old_logits` say the same."""
    from megatron_async.old_logits import BUILDERS

    entry = methods.ANCHORS[anchor]
    for source in (entry.source, *entry.other_sources):
        config = load(write_config(tmp_path), [f"objective.anchor={anchor}", f"old_logits.source={source}"])
        assert entry.built == (source in BUILDERS)
        if entry.built:
            assert isinstance(check(config), list)
        else:
            with pytest.raises(ConfigError, match=f"{anchor} is not built in yet; .*choose one of start"):
                check(config)


@pytest.mark.parametrize("override", ["publish.every=2", "publish.pause_mode=in_place"])
def test_interruption_needs_every_version_published_and_no_cache_that_outlives_it(tmp_path, override):
    message = problems(tmp_path, "objective.anchor=interrupt", override)
    assert "set publish.every to 1" in message
    assert "or use anchor snapshot" in message
