"""The tiny checkpoint loads like a published one; its tokenizer keeps the desk short; demonstrations are mixed."""

from __future__ import annotations

import filecmp
import json
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import tests.engine_reference  # noqa: F401  (lets transformers load beside the installed torchvision)
from megatron_async.config.schema import EnvironmentConfig
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.environments import build_demonstrations
from megatron_async.rollout.environments.desk import DeskTasks
from megatron_async.rollout.environments.desk_agents import NOT_SLOPPY, Sloppiness
from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint
from megatron_async.rollout.environments.desk_demonstrations import demonstrations, record
from megatron_async.rollout.environments.desk_policy import POLICIES, DeskPolicy
from megatron_async.rollout.environments.desk_tokenizer import build_tokenizer, constant_phrases, entities
from tools.make_tiny_checkpoint import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "moe"
    write_tiny_checkpoint(path, seed=3)
    return path


@pytest.fixture(scope="module")
def chat(checkpoint: Path) -> ChatFormat:
    return ChatFormat(checkpoint)


# -- weights and configuration


@pytest.mark.parametrize(
    "shape", [TinyShape(), TinyShape(experts=0), TinyShape(tied_embeddings=True, layers=2)]
)
def test_transformers_loads_every_tensor(tmp_path: Path, shape: TinyShape) -> None:
    from transformers import AutoModelForCausalLM

    parameters = write_tiny_checkpoint(tmp_path / "model", 0, shape)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading.values()), loading
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert type(model).__name__ == ("Qwen3MoeForCausalLM" if shape.experts else "Qwen3ForCausalLM")
    with torch.no_grad():
        loss = model(torch.arange(512)[None], labels=torch.arange(512)[None]).loss
    # Unit-variance logits at start cost half a nat over a uniform guess; far from it the scales would be wrong.
    assert 6.2 < float(loss) < 7.5


def test_names_and_config_are_the_published_ones(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["num_experts"], config["rope_theta"], config["torch_dtype"]) == (8, 10000.0, "float32")
    assert config["eos_token_id"] != config["pad_token_id"]
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.mlp.gate.weight",
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "lm_head.weight",
    } <= names


def test_same_seed_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "again", seed=3)
    write_tiny_checkpoint(tmp_path / "other", seed=4)
    files = sorted(path.name for path in checkpoint.iterdir())
    assert filecmp.cmpfiles(checkpoint, tmp_path / "again", files, shallow=False)[0] == files
    assert filecmp.cmpfiles(checkpoint, tmp_path / "other", files, shallow=False)[1] == ["model.safetensors"]


def test_command_writes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "dense")
    assert main(["--out", out, "--dense", "--layers", "1"]) == 0
    assert json.loads((tmp_path / "dense" / "config.json").read_text())["model_type"] == "qwen3"
    assert main(["--out", out]) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "x"), "--heads", "3"]) == 2
    assert "3 heads cannot share 2 key-value heads" in capsys.readouterr().err


# -- tokenizer


def test_entities_and_constant_phrases_are_one_token_each() -> None:
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 512
    for text in [*entities(), *constant_phrases()]:
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text
    assert tokenizer.encode("A1 B22", add_special_tokens=False)[0] == tokenizer.convert_tokens_to_ids("A1")
    assert tokenizer.convert_tokens_to_ids("B2") not in tokenizer.encode("A1 B22", add_special_tokens=False)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives(chat: ChatFormat, text: str) -> None:
    assert chat.text(chat._tokenizer.encode(text, add_special_tokens=False)) == text


# -- demonstrations


def test_demonstrations_are_short_masked_and_mixed(chat: ChatFormat) -> None:
    pairs = build_demonstrations(EnvironmentConfig(), 100, 5, chat)
    lengths = [len(ids) for ids, _ in pairs]
    assert statistics.mean(lengths) < 100
    assert max(lengths) < 160
    for ids, mask in pairs:
        assert len(ids) == len(mask)
        assert ids[-1] == chat.turn_end_id
        assert mask[-1]
        turns = chat.text([token for token, action in zip(ids, mask, strict=True) if action])
        assert "<|im_start|>" not in turns
        assert turns.count("<|im_end|>") == sum(
            action and token == chat.turn_end_id for token, action in zip(ids, mask, strict=True)
        )
    assert pairs == demonstrations(100, 5, chat)
    assert pairs[:20] != demonstrations(20, 6, chat)


def test_demonstrators_quality_is_what_was_asked_for(chat: ChatFormat) -> None:
    def success(sloppiness: Sloppiness) -> float:
        episodes = record(400, 0, chat, sloppiness, DeskPolicy())
        return statistics.mean(episode.reward for episode in episodes)

    # Foreign orders are found out in half of the cases. Of the own ones, without the record (20 %) only questions about
    # the status (20 %) succeed; with it, those and what is pending or not ignored: 1/3 + 2/3 * 1/2.
    # Tolerance: four standard errors of 400 draws.
    own = 0.2 * 0.2 + 0.8 * (0.2 + 0.8 * (1 / 3 + 2 / 3 * 0.5))
    assert success(Sloppiness()) == pytest.approx(0.25 * 0.5 + 0.75 * own, abs=0.1)
    assert success(NOT_SLOPPY) == 1.0
    with pytest.raises(ValueError, match="sloppiness skip_user is 1.5"):
        Sloppiness(skip_user=1.5)


@pytest.mark.parametrize("name", POLICIES)
def test_careful_demonstrations_succeed_under_every_policy(chat: ChatFormat, name: str) -> None:
    assert all(episode.reward == 1.0 for episode in record(50, 1, chat, NOT_SLOPPY, POLICIES[name]))


def test_demonstrations_take_no_task_that_rl_meets_first() -> None:
    tasks = DeskTasks("train", seed=9)
    demonstrated = {tasks.task(tasks.size - 1 - number).task_id for number in range(4000)}
    assert not demonstrated & {tasks.task(index).task_id for index in range(20_000)}
    assert not demonstrated & {DeskTasks("heldout").task(index).task_id for index in range(10_000)}
