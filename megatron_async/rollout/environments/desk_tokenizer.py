"""A tokenizer of 512 entries for models small enough to learn the desk on a CPU.

What a tiny model can learn is decided here. Every entity it must copy (names, ids, amounts, statuses) is one whole-word
token; the constant parts (schemas, policy sentences, the frames of JSON) are one token each, so a prompt takes tens of
tokens instead of a thousand; the rest of the speech is byte-pair merges. The whole byte alphabet is kept: any text can
be encoded, only less briefly.
"""

from __future__ import annotations

import json

from transformers import PreTrainedTokenizerFast

from megatron_async.rollout.environments import desk_policy, desk_world
from megatron_async.rollout.environments.desk_agents import speech
from megatron_async.rollout.environments.small_tokenizer import HOW_TO_CALL, assemble

VOCABULARY_SIZE = 512
FRAMES = (
    "system\n", "user\n", "assistant\n", "\n\nTools:\n", f"\n{HOW_TO_CALL}",
    '\n{"name": "', '", "arguments": {"name": "', '", "arguments": {"order_id": "', '", "size": "', '"}}\n',
    '", "order_id": "', '\n{"owner": true}\n', '\n{"owner": false}\n',
    '\n{"user_id": "', '", "status": "', '", "amount": ', "}\n",
    '\n{"refund": ', '\n{"ok": true}\n', '\n{"error": "', '"}\n',
)  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template; deterministic. End token <|im_end|>, pad token <|endoftext|>."""
    return assemble(entities(), constant_phrases(), speech(), VOCABULARY_SIZE)


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
