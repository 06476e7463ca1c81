"""Thinking switched on and off: the option reaches every prompt, and long episodes only grow, whatever the template
does with thoughts when it renders a conversation anew."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_async.config.schema import EnvironmentConfig, ModelConfig, RolloutConfig, RunConfig
from megatron_async.rollout.agent_loop import run_episode
from megatron_async.rollout.chat import ChatFormat, ChatFormatError
from megatron_async.rollout.endpoint_policy import endpoint_options
from megatron_async.rollout.environments.base import AssistantTurn, Message, Start, Step, ToolCall
from megatron_async.rollout.environments.desk_tokenizer import build_tokenizer
from megatron_async.rollout.environments.desk_world import TOOLS
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.trajectory import SamplingParams, Trajectory
from sglang_bridge import Generation, Span

TURNS = 30
EMPTY = "<think>\n\n</think>\n\n"

# As Qwen3's: thoughts are kept after the last thing a user said, and an empty block is part of the prompt when they are
# switched off. Results of tools stand in a user's block, but are nothing that a user said.
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    build_tokenizer().save_pretrained(str(folder))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Talk:
    """Thirty turns: the agent's calls are answered by tools (two at a time, now and then), its words by a user."""

    def __init__(self) -> None:
        self.heard: list[AssistantTurn] = []
        self.said: list[Message] = [Message("system", "Work."), Message("user", "order A1?")]

    async def reset(self) -> Start:
        return Start(list(self.said), TOOLS)

    async def step(self, turn: AssistantTurn) -> Step:
        self.heard.append(turn)
        number = len(self.heard)
        answers = [Message("tool", f"result {number}") for _ in turn.tool_calls] or [Message("user", f"go on {number}")]
        self.said += [Message("assistant", turn.content, turn.tool_calls, turn.reasoning), *answers]
        return Step(answers, done=number == TURNS)

    async def reward(self) -> tuple[float, dict[str, Any]]:
        return 1.0, {}

    async def close(self) -> None:
        pass


class Policy:
    """What a model would sample after each prompt: with thoughts where the prompt leaves room for them."""

    def __init__(self, chat: ChatFormat, thinking: bool) -> None:
        self.chat, self.thinking = chat, thinking
        self.requests: list[list[int]] = []
        self.answers: list[list[int]] = []

    async def generate(self, input_ids: list[int], sampling: Any, **options: Any) -> Generation:
        number = len(self.requests)
        call = '<tool_call>\n{"name": "get_order", "arguments": {"order_id": "A1"}}\n</tool_call>'
        words = f"word {number}" if number % 3 == 2 else "\n".join([call] * (1 + number % 2))
        thoughts = f"<think>\nthought {number}\n</think>\n\n" if self.thinking else ""
        ids = self.chat._encode(f"{thoughts}{words}<|im_end|>")
        self.requests.append(list(input_ids))
        self.answers.append(ids)
        return Generation(ids, [-0.5] * len(ids), [Span(0, 0, len(ids))], "stop", None, 0)


@pytest.mark.parametrize("thinking", [True, False])
def test_thirty_turns_only_grow_and_the_mask_is_what_the_policy_said(path: Path, thinking: bool) -> None:
    chat = ChatFormat(path, {"enable_thinking": thinking})
    policy, talk = Policy(chat, thinking), Talk()
    trajectory = Trajectory("t", "g", "p", SamplingParams(1.0, 1.0, -1, 4096), {})
    limits = EpisodeLimits(max_turns=TURNS, max_tokens=100_000, turn_deadline_s=60, trajectory_deadline_s=120)
    asyncio.run(run_episode(policy, chat, talk, trajectory, limits))

    assert (trajectory.info["ending"], len(policy.requests)) == ("done", TURNS)
    ids, mask = trajectory.token_ids.tolist(), np.zeros(len(trajectory), bool)
    following = [*policy.requests[1:], ids]
    for request, answer, longer in zip(policy.requests, policy.answers, following, strict=True):
        assert longer[: len(request) + len(answer)] == request + answer
        prompt = chat.text(request)
        assert prompt.endswith(f"<|im_start|>assistant\n{'' if thinking else EMPTY}")
        mask[len(request) : len(request) + len(answer)] = True
    assert (trajectory.loss_mask == mask).all()
    assert chat.text([i for i, own in zip(ids, mask) if own]) == "".join(map(chat.text, policy.answers))
    assert all(turn.parse_error is None for turn in talk.heard)
    thoughts = [f"thought {number}" if thinking else "" for number in range(TURNS)]
    assert [turn.reasoning for turn in talk.heard] == thoughts
    # every thought is still there, where the template has dropped all but those after the user's last words
    anew = rendered(path, talk.said, thinking)
    assert chat.text(ids).count("thought") == (TURNS if thinking else 0)
    assert anew.count("thought") == 0
    assert chat.text(ids).count(EMPTY) == (0 if thinking else TURNS)


def rendered(path: Path, messages: list[Message], thinking: bool) -> str:
    """By transformers, the whole conversation at once."""
    entries: list[dict[str, Any]] = [
        {
            "role": message.role,
            "content": message.content,
            "reasoning_content": message.reasoning,
            "tool_calls": [{"function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls],
        }
        for message in messages
    ]
    tokenizer = AutoTokenizer.from_pretrained(str(path))
    text: str = tokenizer.apply_chat_template(
        entries, tools=TOOLS, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    return text


@pytest.mark.parametrize("thinking", [True, False])
def test_first_prompt_and_demonstrations_are_the_templates(path: Path, thinking: bool) -> None:
    chat = ChatFormat(path, {"enable_thinking": thinking})
    start = [Message("user", "order A1?")]
    prompt = chat.initial_ids(start, TOOLS)
    assert chat.text(prompt) == rendered(path, start, thinking)
    shown = Message("assistant", "", (ToolCall("get_order", {"order_id": "A1"}),))
    written = chat.text(chat.assistant_ids(shown))
    assert written.startswith(EMPTY) == thinking  # switched off, it is in the prompt already
    assert chat.parse(chat.assistant_ids(shown)).tool_calls[0].name == "get_order"


def test_option_that_the_template_does_not_know_is_refused(path: Path) -> None:
    with pytest.raises(ChatFormatError, match="knows no 'enable_thinkng', .* did you mean 'enable_thinking'"):
        ChatFormat(path, {"enable_thinkng": False})


def test_endpoint_gets_the_options_of_the_template() -> None:
    def asked(**rollout: Any) -> Any:
        config = RunConfig(
            name="x", model=ModelConfig("x"), environment=EnvironmentConfig(), rollout=RolloutConfig(**rollout)
        )
        return json.loads(json.dumps(dict(endpoint_options(config, "http://x", "m", "").sampling)))

    assert asked(chat_template_options={"enable_thinking": False})["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in asked()
