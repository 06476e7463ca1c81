"""A tokenizer of 512 entries for models small enough to learn the desk on a CPU.

What a tiny model can learn is decided here. Every entity it must copy (names, ids, amounts, statuses) is one whole-word
token; the constant parts (schemas, policy sentences, the frames of JSON) are one token each, so a prompt takes tens of
tokens instead of a thousand; the rest of the speech is byte-pair merges. The whole byte alphabet is kept: any text can
be encoded, only less briefly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_async.rollout.environments import desk_policy, desk_world
from megatron_async.rollout.environments.desk_agents import speech

VOCABULARY_SIZE = 512
CONTEXT_LENGTH = 4096
"""Longest sequence of the tiny models; a desk episode takes about 90 tokens."""
TURN_START, TURN_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CONTROL_TOKENS = (PAD, TURN_START, TURN_END)
MARKERS = (
    "<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
HOW_TO_CALL = "To call a tool, write its name and arguments as JSON between tool_call marks."
FRAMES = (
    "system\n", "user\n", "assistant\n", "\n\nTools:\n", f"\n{HOW_TO_CALL}",
    '\n{"name": "', '", "arguments": {"name": "', '", "arguments": {"order_id": "', '", "size": "', '"}}\n',
    '", "order_id": "', '\n{"owner": true}\n', '\n{"owner": false}\n',
    '\n{"user_id": "', '", "status": "', '", "amount": ', "}\n",
    '\n{"refund": ', '\n{"ok": true}\n', '\n{"error": "', '"}\n',
)  # fmt: skip

# ChatML with tools. Text only grows: no turn is written differently because of a later one.
CHAT_TEMPLATE = """\
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {%- if tools %}
        {{- '\\n\\nTools:\\n<tools>' }}
        {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
        {{- '\\n</tools>\\nHOW_TO_CALL' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".replace("HOW_TO_CALL", HOW_TO_CALL)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template; deterministic. End token <|im_end|>, pad token <|endoftext|>."""
    words, phrases = entities(), constant_phrases()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(words) - len(phrases),
        special_tokens=[*CONTROL_TOKENS, *MARKERS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=16,
        show_progress=False,
    )
    backend.train_from_iterator(_pieces([*words, *phrases]), trainer)
    # Markers of tools and reasoning are whole tokens, but text: only control tokens may be dropped when decoding.
    backend.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    backend.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    backend.add_tokens(
        [AddedToken(word, special=False, normalized=False, single_word=True) for word in words]
    )
    _fill(backend)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def entities() -> list[str]:
    """What the policy copies or chooses, as whole words."""
    numbers = [str(amount) for amount in desk_world.AMOUNTS]
    words = [*desk_world.NAMES, *desk_world.USER_IDS, *desk_world.ORDER_IDS, *numbers, *desk_world.STATUSES]
    return list(dict.fromkeys([*words, *desk_policy.OUTCOMES, *desk_world.TOOL_ARGUMENTS]))


def constant_phrases() -> list[str]:
    """What never varies inside: frames of JSON and ChatML, tool schemas, sentences of every policy."""
    schemas = ["\n" + json.dumps(tool) for tool in desk_world.TOOLS]
    clauses = [desk_policy.ROLE_CLAUSE]
    varying = [*desk_policy.CANCEL_CLAUSES.values(), *desk_policy.CONFIRM_CLAUSES.values()]
    clauses += [" " + clause for clause in (*desk_policy.COMMON_CLAUSES, *varying)]
    return [*FRAMES, *schemas, *clauses]


def _pieces(cut: list[str]) -> Iterator[str]:
    border = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in cut))
    for line in speech():
        yield from (piece for piece in border.split(line) if piece)


def _fill(backend: Tokenizer) -> None:
    """Name the ids that training left over, so that the model's vocabulary and the tokenizer's are one."""
    missing = VOCABULARY_SIZE - backend.get_vocab_size()
    if missing < 0:
        raise ValueError(f"the desk's tokens do not fit {VOCABULARY_SIZE} entries: {-missing} too many")
    backend.add_tokens(
        [AddedToken(f"<|unused_{i}|>", special=False, normalized=False) for i in range(missing)]
    )
