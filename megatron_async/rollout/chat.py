"""Messages to token ids and back, for one tokenizer and its chat template.

Invariants
- Tokens are never re-tokenised. An episode's ids are `initial_ids`, then for each turn the policy's own ids followed by
  `observation_ids`: nothing already written is encoded again, so no border can merge and no earlier turn can change.
- What is appended is what the template would have written there. That is checked when a `ChatFormat` is built: the
  template must write a turn's observations the same way after any conversation, must leave the text before them alone,
  and must close an assistant turn with a stop token. A template that does not is refused, with the reason.
- `parse` never raises: whatever the policy wrote becomes a turn, and what is wrong with it stands in `parse_error`.
- Padding plays no part: masks come from where tokens are born, so a tokenizer whose pad token is its end token is safe.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_async.errors import UserError
from megatron_async.rollout.environments.base import AssistantTurn, Message, ToolCall
from megatron_async.rollout.json_depth import shallow

_SENTINEL = "zqxsentinelqxz"
_PROBE_NAME = "zqxtoolqxz"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE_NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_CLOSING = "</tool_call>"


class ChatFormatError(UserError, ValueError):
    """The tokenizer cannot carry a multi-turn conversation with tools; the message says why and how to fix it."""


class ChatFormat:
    """How one tokenizer writes a conversation.

    `stop_token_ids`: sampling ends at any of them (the tokenizer's end token and those of generation_config.json).
    `turn_end_id`: the one the template writes after an assistant turn.
    """

    def __init__(self, tokenizer_path: str | Path, template_options: Mapping[str, Any] | None = None) -> None:
        """Load and check the tokenizer in a checkpoint directory.

        `template_options` go to the chat template (e.g. {"enable_thinking": False} for Qwen3).
        Raises ChatFormatError when the directory holds no tokenizer, no chat template, one without tools, one that does
        not know an option, or one whose earlier text depends on later messages.
        """
        self._path = Path(tokenizer_path)
        self._options = dict(template_options or {})
        if not (self._path / "tokenizer_config.json").is_file():
            raise ChatFormatError(
                f"{self._path} holds no tokenizer (tokenizer_config.json is missing): copy the tokenizer files of the "
                f"model into the checkpoint directory"
            )
        self._tokenizer = _load_tokenizer(self._path)
        if not self._tokenizer.chat_template:
            raise ChatFormatError(
                f"the tokenizer in {self._path} has no chat template: add chat_template.jinja (a ChatML template with "
                f"tools, such as the one of Qwen3) beside tokenizer_config.json"
            )
        if self._tokenizer.eos_token_id is None:
            raise ChatFormatError(
                f"the tokenizer in {self._path} has no eos_token: set it in tokenizer_config.json"
            )
        self.stop_token_ids: tuple[int, ...] = self._stop_tokens()
        self._control = tuple(token for token in self._tokenizer.all_special_tokens if len(token) > 1)
        self._refuse_unknown_options()
        self._refuse_template_without_tools()
        self.turn_end_id: int = self._find_turn_end()
        self._refuse_unstable_template()

    # -- messages to ids

    def initial_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of the conversation before the policy's first turn, the generation prompt included."""
        return self._encode(self._render(messages, tools, prompt=True))

    def observation_ids(self, messages: Sequence[Message], *, closed: bool = True) -> list[int]:
        """Ids to append after a policy turn: what follows its end token, the observations, the next generation prompt.

        `closed`: the turn's last token is `turn_end_id`. If not (it ended at another stop token or at a limit), the end
        token is put in front; it is context, not an action. Raises ValueError for no messages.
        """
        if not messages:
            raise ValueError("observation_ids: no messages; after a final turn there is nothing to append")
        ids = self._encode(self._delta(messages, variant=0))
        return ids if closed else [self.turn_end_id, *ids]

    def assistant_ids(self, turn: Message) -> list[int]:
        """Ids a policy would have to produce to say `turn`, its end token included: for demonstrations."""
        base = [Message("user", "hello")]
        start = self._render(base, (), prompt=False)
        whole = self._render([*base, turn], (), prompt=False)[len(start) :]
        prompt = self._render(base, (), prompt=True)[len(start) :]
        end = self._tokenizer.convert_ids_to_tokens(self.turn_end_id)
        if not whole.startswith(prompt):
            raise ChatFormatError(
                f"the template in {self._path} writes an assistant turn as {whole!r}, which does not begin with its "
                f"generation prompt {prompt!r}: set template_options so that both agree"
            )
        return self._encode(whole[len(prompt) : whole.rindex(end) + len(end)])

    # -- ids to a turn

    def parse(self, ids: Sequence[int]) -> AssistantTurn:
        """The turn in the ids the policy produced, with or without a closing stop token."""
        body = list(ids[:-1]) if ids and ids[-1] in self.stop_token_ids else list(ids)
        text = self.text(body)
        reasoning, rest, error = _split_reasoning(text)
        calls: list[ToolCall] = []
        # Nothing is looked for after the last closing mark: thousands of opening ones there would each read to the end.
        last = rest.rfind(_CLOSING) + len(_CLOSING) if _CLOSING in rest else 0
        for number, match in enumerate(_CALL.finditer(rest, 0, last), start=1):
            call, problem = _parse_call(match.group(1))
            if call is not None:
                calls.append(call)
            error = error or (f"tool call {number}: {problem}" if problem else None)
        content = (_CALL.sub("", rest[:last]) + rest[last:]).strip()
        return AssistantTurn(content, tuple(calls), error or self._malformed(content, calls), reasoning)

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens shown: for logs and transcripts."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _malformed(self, content: str, calls: Sequence[ToolCall]) -> str | None:
        for marker in ("<tool_call>", "</tool_call>"):
            if marker in content:
                return f"{marker} without its counterpart"
        for token in self._control:
            if token in content:
                return f"control token {token} inside the turn"
        return None if content or calls else "the turn is empty"

    # -- the template

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, prompt: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [self._as_dict(message) for message in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=prompt,
            **self._options,
        )
        return text

    def _as_dict(self, message: Message) -> dict[str, Any]:
        result: dict[str, Any] = {"role": message.role, "content": self._plain(message.content)}
        if message.reasoning:
            result["reasoning_content"] = message.reasoning
        if message.tool_calls:
            result["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
        return result

    def _plain(self, content: str) -> str:
        # A tool result or a user must not be able to forge the borders of turns: "<|im_end|>" in a web page is text.
        for token in self._control:
            content = content.replace(token, token[0] + " " + token[1:])
        return content

    def _encode(self, text: str) -> list[int]:
        # A lone surrogate, which JSON of a policy or a tool may spell, is no text: a tokenizer raises TypeError for it.
        text = text.encode("utf-8", "replace").decode()
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _conversation(self, variant: int, role: str) -> list[Message]:
        """A conversation that ends with an assistant turn holding the sentinel; variants differ before it."""
        history = [Message("user", "hello")]
        if variant == 1:
            roles = [("system", "Be brief."), ("user", "one"), ("assistant", "two"), ("user", "3")]
            history = [Message(role, content) for role, content in roles]  # type: ignore[arg-type]
        if role == "tool":
            call = ToolCall(_PROBE_NAME, {"x": _SENTINEL}, "call00001")
            return [*history, Message("assistant", "", (call,))]
        return [*history, Message("assistant", _SENTINEL)]

    def _after_turn(self, rendered: str) -> str:
        """What the template wrote after the sentinel's turn, from the end token's text on."""
        tail = rendered[rendered.rindex(_SENTINEL) + len(_SENTINEL) :]
        ends = [
            token
            for token in map(self._tokenizer.convert_ids_to_tokens, self.stop_token_ids)
            if token in tail
        ]
        if not ends:
            raise ChatFormatError(
                f"the template in {self._path} does not close an assistant turn with a stop token (it writes {tail!r}; "
                f"stop tokens: {self._tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))}): set eos_token in "
                f"tokenizer_config.json, or eos_token_id in generation_config.json, to the token that ends a turn"
            )
        return tail[min(tail.index(token) for token in ends) :]

    def _delta(self, messages: Sequence[Message], variant: int) -> str:
        conversation = self._conversation(variant, messages[0].role)
        rendered = self._render([*conversation, *messages], (), prompt=True)
        end: str = self._tokenizer.convert_ids_to_tokens(self.turn_end_id)
        return self._after_turn(rendered)[len(end) :]

    # -- checks at construction

    def _stop_tokens(self) -> tuple[int, ...]:
        stops = [self._tokenizer.eos_token_id]
        generation = self._path / "generation_config.json"
        if generation.is_file():
            configured = json.loads(generation.read_text()).get("eos_token_id") or []
            stops += configured if isinstance(configured, list) else [configured]
        return tuple(dict.fromkeys(stops))

    def _refuse_unknown_options(self) -> None:
        template = self._tokenizer.chat_template
        known = set(re.findall(r"\w+", template if isinstance(template, str) else "\n".join(template.values())))
        for name in sorted(self._options.keys() - known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ChatFormatError(
                f"rollout.chat_template_options: the chat template in {self._path} knows no {name!r}, which would "
                f"change nothing{hint}"
            )

    def _refuse_template_without_tools(self) -> None:
        text = self._render([Message("user", "hello")], [_PROBE_TOOL], prompt=True)
        called = self._render(self._conversation(0, "tool"), (), prompt=False)
        for missing in [
            what for what, where in (("tools", text), ("tool calls", called)) if _PROBE_NAME not in where
        ]:
            raise ChatFormatError(
                f"the chat template in {self._path} ignores {missing}: the agent would never see them. Use a template "
                f"that renders `tools` and `tool_calls` (for Qwen models the chat_template.jinja published with them)"
            )

    def _find_turn_end(self) -> int:
        tail = self._after_turn(self._render(self._conversation(0, "user"), (), prompt=False))
        return self._encode(tail)[0]

    def _refuse_unstable_template(self) -> None:
        for observation in (
            [Message("user", "go on")],
            [Message("tool", '{"ok": true}')],
            [Message("tool", "1"), Message("tool", "2")],
        ):
            conversation = self._conversation(0, observation[0].role)
            before = self._render(conversation[:-1], [_PROBE_TOOL], prompt=False)
            whole = self._render([*conversation, *observation], [_PROBE_TOOL], prompt=True)
            first, second = self._delta(observation, variant=0), self._delta(observation, variant=1)
            end = self._tokenizer.convert_ids_to_tokens(self.turn_end_id)
            if not whole.startswith(before) or first != second or self._after_turn(whole) != end + first:
                raise ChatFormatError(
                    f"the chat template in {self._path} rewrites earlier text when a {observation[0].role} message "
                    f"follows, so turns cannot be appended token by token: after a turn it writes {first!r} in one "
                    f"conversation and {second!r} in another. Use a template whose text only grows"
                )
            head = whole[: len(whole) - len(first)]
            if self._encode(head) + self._encode(first) != self._encode(whole):
                raise ChatFormatError(
                    f"the tokenizer in {self._path} merges tokens across the end of a turn ({end!r} + {first!r}): "
                    f"declare {end!r} as a special token in tokenizer.json"
                )


_PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")


def _load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """A tokenizer that is its tokenizer.json and nothing more is loaded as such: `AutoTokenizer`, which knows every
    model, imports torch, five seconds and 370 MB more for each process that only needs the text."""
    kind = json.loads((path / "tokenizer_config.json").read_text()).get("tokenizer_class")
    if kind in _PLAIN and (path / "tokenizer.json").is_file():
        plain: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        return plain
    from transformers import AutoTokenizer

    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    return found


def _split_reasoning(text: str) -> tuple[str, str, str | None]:
    """(reasoning, rest, error). The opening mark may be missing: some templates write it in the generation prompt."""
    head, mark, rest = text.partition("</think>")
    if mark:
        return head.replace("<think>", "", 1).strip(), rest, None
    before, mark, reasoning = text.partition("<think>")
    if mark:
        return reasoning.strip(), before, "<think> without </think>"
    return "", text, None


def _parse_call(text: str) -> tuple[ToolCall | None, str | None]:
    """(call, None) or (None, what is wrong with it)."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return None, f"not JSON ({error})"
    except RecursionError:
        return None, "nested too deeply"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None, 'not an object with a "name"'
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None, '"arguments" is not an object'
    if not shallow(arguments):
        return None, "nested too deeply"
    return ToolCall(value["name"], arguments), None
