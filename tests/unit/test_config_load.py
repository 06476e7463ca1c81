"""YAML to typed, resolved configuration: strict types, nearest names, overrides, round trip."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.config import ConfigError, dump, from_dict, load, methods, schema
from megatron_async.config.errors import nearest
from megatron_async.config.loader import apply_override, parse_yaml
from megatron_async.config.typed import dotted_keys
from tests.unit.configs import write_config

MINIMAL = {"name": "x", "model": {"path": "m"}}


def problems_of(data: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        from_dict(data)
    return str(caught.value)


def test_config_package_imports_neither_torch_nor_megatron():
    code = (
        "import sys, megatron_async.config.describe, megatron_async.observe.report, megatron_async.cli\n"
        "print([m for m in ('torch', 'megatron', 'sglang', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_defaults_and_given_values():
    config = from_dict(
        {**MINIMAL, "optimizer": {"lr": 3e-4}, "engines": {"extra_args": ["--log-level", "info"]}}
    )
    assert config.optimizer.lr == 3e-4
    assert config.optimizer.adam_beta2 == 0.98
    assert config.engines.extra_args == ("--log-level", "info")
    assert config.run_path == Path("runs/x")
    assert config.bank_url == "sqlite:///runs/x/bank.sqlite"


def test_everything_left_open_is_decided():
    layout = {"world_size": 8, "tensor_model_parallel_size": 2}
    trainer = {"nodes": 2, "updates_per_batch": 3}
    config = from_dict({**MINIMAL, "layout": layout, "trainer": trainer, "steps": 5})
    assert config.layout.sequence_parallel is True
    assert config.trainer.nproc_per_node == 4
    assert config.optimizer.lr_decay_steps == 15
    assert (config.objective.anchor, config.old_logits.source) == ("start", "start")
    assert (config.objective.mask_low, config.objective.mask_high) == (0.990, 1.010)
    assert (config.objective.clip_low, config.objective.clip_high) == (0.003, 0.004)
    assert config.bank.keep == "all"
    assert "auto" not in dump(config)


def test_routed_experts_do_not_stay_for_ever():
    assert from_dict({**MINIMAL, "engines": {"routed_experts": True}}).bank.keep == "resumable"
    kept = from_dict({**MINIMAL, "engines": {"routed_experts": True}, "bank": {"keep": "all"}})
    assert kept.bank.keep == "all"


def test_given_thresholds_win_over_the_papers():
    config = from_dict({**MINIMAL, "objective": {"mask_low": 0.5, "clip_high": 0.28}})
    assert (config.objective.mask_low, config.objective.mask_high) == (0.5, 1.010)
    assert config.objective.clip_high == 0.28


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"optimiser": {"lr": 1.0}}, ["optimiser: unknown key", "did you mean optimizer?"]),
        (
            {"layout": {"tensor_parallel_size": 2}},
            ["layout.tensor_parallel_size", "tensor_model_parallel_size?"],
        ),
        ({"lr": 1.0}, ["lr: unknown key", "did you mean optimizer.lr?"]),
        ({"zzz": 1}, ["zzz: unknown key", "choose from:"]),
        ({"batch": {"groups": 1.5}}, ["batch.groups: expected an integer, got 1.5 (float)"]),
        ({"batch": {"groups": True}}, ["batch.groups: expected an integer, got True (bool)"]),
        ({"batch": {"groups": "4"}}, ["batch.groups: expected an integer, got '4' (str)"]),
        ({"trainer": {"recompute": 1}}, ["trainer.recompute: expected true or false, got 1 (int)"]),
        ({"optimizer": {"lr": float("nan")}}, ["optimizer.lr: is not a number (nan)"]),
        ({"publish": {"verify": "cannary"}}, ["'canary', 'checksum', 'off'", "did you mean 'canary'?"]),
        ({"engines": {"extra_args": "--x"}}, ["engines.extra_args: expected a list of a text"]),
        ({"environment": {"options": [1]}}, ["environment.options: expected a mapping"]),
        ({"layout": {"virtual_pipeline_model_parallel_size": "2"}}, ["expected an integer or null, got '2'"]),
        ({"layout": 3}, ["layout: expected a mapping of options, got 3"]),
        ({"objective": {"name": "decoupeld"}}, ["objective.name", "did you mean 'decoupled'?"]),
        (
            {"objective": {"name": "sat", "anchor": "start"}},
            ["objective.anchor: 'start' does not go with method sat"],
        ),
        (
            {"objective": {"options": {"cap": 2.0}}},
            ["objective.options.cap: unknown option of method decoupled"],
        ),
        (
            {"objective": {"name": "tis", "options": {"cpa": 2.0}}},
            ["objective.options.cpa", "did you mean 'cap'?"],
        ),
        ({"objective": {"name": "tis", "options": {"cap": "2"}}}, ["objective.options.cap: '2' is a str"]),
        (
            {"objective": {"name": "tis", "options": {"cap": -1.0}}},
            ["objective.options.cap: -1.0 is outside [0.0"],
        ),
        ({"objective": {"name": "mis", "options": {"level": "tokens"}}}, ["token, sequence, geometric"]),
        ({"advantage": {"name": "grop"}}, ["advantage.name", "did you mean 'grpo'?"]),
    ],
)
def test_a_wrong_value_is_refused_with_the_way_out(data, words):
    """Field bug 39: a misspelt option is never ignored."""
    message = problems_of({**MINIMAL, **data})
    assert all(word in message for word in words), message


def test_all_problems_come_at_once_and_required_keys_are_named():
    message = problems_of({"batch": {"groups": "a", "grup_size": 3}})
    assert "5 problems" not in message
    for word in (
        "batch.groups:",
        "did you mean batch.group_size?",
        "name: is required",
        "model: is required",
    ):
        assert word in message


def test_overrides_are_yaml_and_apply_in_order(tmp_path):
    file = write_config(tmp_path)
    overrides = [
        "optimizer.lr=1e-6",
        "engines.extra_args=[--a, b]",
        "objective.anchor=ewma",
        "optimizer.lr=2e-6",
    ]
    config = load(file, [*overrides, "objective.options.beta=0.6", "environment.options.level=2"])
    assert config.optimizer.lr == 2e-6
    assert config.engines.extra_args == ("--a", "b")
    assert config.objective.options["beta"] == 0.6
    assert config.environment.options == {"level": 2}


@pytest.mark.parametrize("override", ["optimizer.lr", "=3", "optimizer..lr=3", "name.first=3"])
def test_an_override_that_is_no_assignment_is_refused(tmp_path, override):
    with pytest.raises(ConfigError, match="--set"):
        load(write_config(tmp_path), [override])


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "missing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: x\nmodel: {path: [\n")
    with pytest.raises(ConfigError, match="not valid YAML in line"):
        load(broken)
    broken.write_text("- a\n")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load(broken)
    broken.write_text("name: x\nname: y\n")
    with pytest.raises(ConfigError, match="name: written twice .*line 2"):
        load(broken)


def test_numbers_are_read_as_people_write_them():
    read = parse_yaml("a: 1e-6\nb: 2.5E+3\nc: .inf\nd: 12\ne: 1e\nf: e5\n", "test")
    assert read == {"a": 1e-6, "b": 2500.0, "c": math.inf, "d": 12, "e": "1e", "f": "e5"}


@given(
    lr=st.floats(1e-9, 1.0),
    groups=st.integers(1, 10**6),
    low=st.one_of(st.none(), st.floats(0.0, 1.0)),
    high=st.one_of(st.none(), st.floats(1.0, math.inf)),
    name=st.sampled_from(sorted(methods.METHODS)),
    arguments=st.lists(st.text(max_size=8), max_size=3),
)
@settings(max_examples=40)
def test_dump_and_load_are_inverse(lr, groups, low, high, name, arguments):
    objective = {"name": name, "mask_low": low, "mask_high": high}
    data = {**MINIMAL, "optimizer": {"lr": lr}, "batch": {"groups": groups}, "objective": objective}
    config = from_dict({**data, "engines": {"extra_args": arguments}})
    assert from_dict(parse_yaml(dump(config), "dump")) == config


def test_every_preset_and_legal_anchor_resolves_once_and_for_all():
    resolved = 0
    for name, method in methods.METHODS.items():
        for anchor in method.anchors or ("rollout",):
            once = methods.resolve_objective(schema.ObjectiveConfig(name=name, anchor=anchor))
            assert methods.resolve_objective(once) == once
            assert None not in (once.mask_low, once.mask_high, once.clip_low, once.clip_high)
            assert once.weight in methods.WEIGHTS
            resolved += 1
    assert resolved > len(methods.METHODS)


def test_thresholds_that_depend_on_an_option():
    geometric = schema.ObjectiveConfig(name="mis", options={"level": "geometric"})
    assert methods.resolve_objective(geometric).mask_high == 1.001
    assert methods.resolve_objective(schema.ObjectiveConfig(name="mis")).mask_high == 2.0


def test_ewma_takes_beta_or_a_window_but_not_both():
    def options(**given: float) -> dict:
        config = schema.ObjectiveConfig(anchor="ewma", options=given)
        return methods.resolve_objective(config).options

    assert options()["beta"] == 0.75
    assert options(staleness_window=3.0)["staleness_window"] == 3.0
    assert "beta" not in options(staleness_window=3.0)
    with pytest.raises(ConfigError, match="beta and staleness_window are both given"):
        options(beta=0.5, staleness_window=3.0)


def test_every_option_has_a_text():
    from tools.render_config_docs import field_texts

    sections = [
        schema.RunConfig,
        *(s for s in get_type_hints(schema.RunConfig).values() if dataclasses.is_dataclass(s)),
    ]
    for section in sections:
        named = {field.name for field in dataclasses.fields(section)}
        assert named == set(field_texts(section)), section.__name__
        assert section.__dataclass_params__.frozen
    assert len(dotted_keys(schema.RunConfig)) > 90


def test_configuration_page_is_current():
    from tools import render_config_docs

    assert render_config_docs.PAGE.read_text(encoding="utf-8") == render_config_docs.render()


def test_nearest_names_all_when_none_is_near():
    assert nearest("qqqq", ["alpha", "beta"]) == "choose from: alpha, beta"
    assert nearest("alhpa", ["alpha", "beta"]) == "did you mean 'alpha'?"


def test_apply_override_makes_missing_sections():
    data: dict = {}
    apply_override(data, "a.b.c=[1, 2]")
    assert data == {"a": {"b": {"c": [1, 2]}}}


def test_a_file_lies_over_its_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("name: a\nmodel: {path: m}\nbatch: {groups: 3, group_size: 4}\nsteps: 7\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "top.yaml").write_text("base: ../base.yaml\nname: b\nbatch: {group_size: 2}\n")
    config = load(tmp_path / "sub" / "top.yaml", ["steps=9"])
    assert (config.name, config.batch.groups, config.batch.group_size, config.steps) == ("b", 3, 2, 9)


def test_bases_that_are_missing_or_go_round_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    with pytest.raises(ConfigError, match=r"b\.yaml, which .*a\.yaml names as its base: no such file"):
        load(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="leads back"):
        load(tmp_path / "a.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        load(tmp_path / "a.yaml")
