"""The small tokenizer of telecom tickets: an episode is short, nothing is lost, held-out tasks are not looked at."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config import load
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.environments.tau2.environment import Tau2Tasks
from tests.unit.tau2_support import requires_tau2

ROOT = Path(__file__).resolve().parents[2]
pytestmark = requires_tau2


def options() -> dict[str, Any]:
    config = load(str(ROOT / "recipes/configs/tau2_telecom_cpu_warm_start.yaml"), [])
    prompt = str(ROOT / config.environment.options["system_prompt_file"])
    return {**config.environment.options, "system_prompt_file": prompt}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from megatron_async.rollout.environments.tau2 import telecom_tokenizer

    return telecom_tokenizer.build(options(), 0)


@given(st.text(st.sampled_from('ab., "|\n{}📱é'), max_size=60))
def test_pieces_joined_are_the_text(text: str) -> None:
    from megatron_async.rollout.environments.tau2.telecom_tokenizer import cut

    assert "".join(cut(text)) == text


def test_a_ticket_of_either_split_is_a_few_hundred_tokens(tokenizer: Any, tmp_path: Path) -> None:
    from megatron_async.rollout.environments.tau2.demonstrations import record
    from megatron_async.rollout.environments.tau2.options import parse

    tokenizer.save_pretrained(str(tmp_path))
    chat = ChatFormat(tmp_path)
    for split in ("train", "heldout"):
        source = Tau2Tasks(parse(options()), split, 0)  # type: ignore[arg-type]
        for episode in asyncio.run(record(source, 4, 0, chat)):
            assert episode.reward == 1.0
            assert 100 < len(episode.token_ids) < 800
            assert chat.text(episode.token_ids).encode()  # every id has text


def test_any_text_survives(tokenizer: Any) -> None:
    for text in ("Error: Tool 'x' not found.", "Zażółć 📶⁴ \x07", '{"line_id": "L9", "x": [1, null]}'):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 1024


def test_tokenizer_needs_a_domain_with_demonstrations() -> None:
    from megatron_async.rollout.environments.tau2 import telecom_tokenizer

    with pytest.raises(ValueError, match="telecom in solo mode"):
        telecom_tokenizer.build({"domain": "retail", "user": {"kind": "scripted"}}, 0)
