"""Tokenizers of a few hundred entries for models small enough to learn an environment on a CPU.

Invariants
- The whole byte alphabet is kept: any text can be encoded, only less briefly than what the tokenizer was made for.
- Vocabulary and tokenizer have the same number of entries, and the same input gives the same tokenizer.
- The chat template is ChatML with tools whose text only grows: no turn is written differently because of a later one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTEXT_LENGTH = 4096
"""Longest sequence of the tiny models."""
TURN_START, TURN_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CONTROL_TOKENS = (PAD, TURN_START, TURN_END)
MARKERS = (
    "<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
HOW_TO_CALL = "To call a tool, write its name and arguments as JSON between tool_call marks."

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


def assemble(
    words: Sequence[str], phrases: Sequence[str], speech: Iterable[str], size: int
) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` entries: one for each of `words` (where it stands as a whole word) and of `phrases`
    (anywhere), byte-pair merges learnt from `speech` for the rest. End token <|im_end|>, pad token <|endoftext|>.

    Raises ValueError when words and phrases leave no room for the byte alphabet.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(words) - len(phrases),
        special_tokens=[*CONTROL_TOKENS, *MARKERS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=16,
        show_progress=False,
    )
    backend.train_from_iterator(_pieces([*words, *phrases], speech), trainer)
    # Markers of tools and reasoning are whole tokens, but text: only control tokens may be dropped when decoding.
    backend.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    backend.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    backend.add_tokens(
        [AddedToken(word, special=False, normalized=False, single_word=True) for word in words]
    )
    _fill(backend, size)
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


def _pieces(cut: Sequence[str], speech: Iterable[str]) -> Iterator[str]:
    border = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in cut))
    for line in speech:
        yield from (piece for piece in border.split(line) if piece)


def _fill(backend: Tokenizer, size: int) -> None:
    """Name the ids that training left over, so that the model's vocabulary and the tokenizer's are one."""
    missing = size - backend.get_vocab_size()
    if missing < 0:
        raise ValueError(f"words and phrases do not fit {size} entries: {-missing} too many")
    backend.add_tokens(
        [AddedToken(f"<|unused_{i}|>", special=False, normalized=False) for i in range(missing)]
    )
