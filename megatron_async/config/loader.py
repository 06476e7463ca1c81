"""From a YAML file and `--set` overrides to a resolved `RunConfig`.

Invariants: what `load` returns has no "auto" and no null that a field's documentation says will be decided;
`from_dict(yaml of dump(cfg))` equals `cfg`; a key written twice is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron_async.config import methods, typed
from megatron_async.config.errors import ConfigError
from megatron_async.config.schema import (
    BankConfig,
    CriticConfig,
    LayoutConfig,
    OldLogitsConfig,
    OptimizerConfig,
    RunConfig,
    TrainerConfig,
)
from megatron_async.passwords import hide_password, holds_password


class _Loader(yaml.SafeLoader):
    """YAML with the numbers people write (`1e-6` is a number) and without silently repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if key in seen:
                raise ConfigError(
                    [f"{key}: written twice (second time in line {key_node.start_mark.line + 1})"]
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML follows, reads `off` as false, and `1e-6` as text because it has no dot.
_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, where: str) -> Any:
    """The plain values of a YAML text; raises ConfigError with line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError([f"not valid YAML{place}: {getattr(error, 'problem', error)}"], where) from error


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set `a.b=value` in nested dicts, the value read as YAML; raises ConfigError when it is no such assignment."""
    key, sign, text = override.partition("=")
    parts = key.strip().split(".")
    if not sign or not all(parts):
        raise ConfigError(
            [f"--set {override}: expected KEY=VALUE with a dotted key, such as optimizer.lr=1e-6"]
        )
    assign(data, key.strip(), parse_yaml(text, f"--set {override}"), f"--set {override}")


def assign(data: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set `a.b` in nested dicts, made where missing; raises ConfigError when `a` is there and no mapping."""
    parts, node = key.split("."), data
    for depth, part in enumerate(parts[:-1]):
        if node.get(part) is None:  # a section that may be null
            node[part] = {}
        child = node[part]
        if not isinstance(child, dict):
            above = ".".join(parts[: depth + 1])
            raise ConfigError([f"{where}: {above} is {child!r}, which has no keys of its own"])
        node = child
    node[parts[-1]] = value


def _resolve_layout(layout: LayoutConfig) -> LayoutConfig:
    return replace(layout, sequence_parallel=layout.uses_sequence_parallel)


def _resolve_critic(critic: CriticConfig, actor: LayoutConfig) -> CriticConfig:
    if critic.ranks == "shared" and critic.layout is None:
        return critic
    return replace(critic, layout=_resolve_layout(critic.layout or actor))


def _resolve_trainer(trainer: TrainerConfig, world_size: int) -> TrainerConfig:
    if trainer.nproc_per_node is not None or trainer.nodes < 1:
        return trainer
    return replace(trainer, nproc_per_node=world_size // trainer.nodes)


def _resolve_optimizer(optimizer: OptimizerConfig, updates: int) -> OptimizerConfig:
    return optimizer if optimizer.lr_decay_steps is not None else replace(optimizer, lr_decay_steps=updates)


def _resolve_old_logits(old_logits: OldLogitsConfig, anchor: str) -> OldLogitsConfig:
    if old_logits.source != "auto":
        return old_logits
    return replace(old_logits, source=methods.ANCHORS[anchor].source)


def _resolve_bank(bank: BankConfig, routed_experts: bool) -> BankConfig:
    return bank if bank.keep != "auto" else replace(bank, keep="resumable" if routed_experts else "all")


def resolve(config: RunConfig) -> RunConfig:
    """`config` with everything decided that can be left open; resolving twice changes nothing."""
    objective = methods.resolve_objective(config.objective)
    return replace(
        config,
        layout=_resolve_layout(config.layout),
        trainer=_resolve_trainer(config.trainer, config.layout.world_size),
        optimizer=_resolve_optimizer(config.optimizer, config.steps * config.trainer.updates_per_batch),
        objective=objective,
        advantage=methods.resolve_advantage(config.advantage),
        critic=_resolve_critic(config.critic, config.layout),
        old_logits=_resolve_old_logits(config.old_logits, objective.anchor),
        bank=_resolve_bank(config.bank, config.engines.routed_experts),
    )


def from_dict(data: Mapping[str, Any], where: str = "") -> RunConfig:
    """A resolved configuration from plain values; raises ConfigError with every problem found."""
    config = typed.build(RunConfig, data, where)
    try:
        return resolve(config)
    except ConfigError as error:
        raise ConfigError(error.problems, where) from error


def read_file(file: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The plain values of a file, laid over those of its `base`; above: the files that named it."""
    if not file.is_file():
        named = f", which {above[-1]} names as its base" if above else ""
        raise ConfigError(
            [f"{file}{named}: no such file; give the path of a YAML configuration (see recipes/configs)"]
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([f"not text in UTF-8: {error}"], str(file)) from error
    data = parse_yaml(text, str(file))
    if not isinstance(data, dict):
        raise ConfigError([f"expected a mapping of options, got {data!r}"], str(file))
    base = data.pop("base", None)
    if base is None:
        return data
    below = (file.parent / str(base)).resolve()
    if below in (file.resolve(), *above):
        raise ConfigError([f"base: {base} leads back to a file that starts from this one"], str(file))
    return laid_over(read_file(below, (*above, file.resolve())), data)


def laid_over(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` where it says something, else `base`; sections are merged key by key, anything else is replaced."""
    merged = dict(base)
    for key, value in data.items():
        below = merged.get(key)
        both_sections = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = laid_over(dict(below or {}), value) if both_sections else value
    return merged


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `a.b=value` overrides in order, and return the resolved configuration.

    A file may start from another: `base: other.yaml`, relative to its own folder; what it says itself goes before.

    Raises ConfigError when the file is missing, is no YAML, or holds unknown keys, wrong types or illegal values.
    """
    data = read_file(Path(path))
    for override in overrides:
        apply_override(data, override)
    return from_dict(data, str(path))


def dump(config: RunConfig) -> str:
    """The configuration as YAML, in the schema's order; `load` reads it back as the same configuration."""
    return yaml.safe_dump(typed.to_plain(config), sort_keys=False, width=110, allow_unicode=True)


def shown(config: RunConfig) -> str:
    """As `dump`, for people to read: without the password of `bank.url`."""
    return dump(replace(config, bank=replace(config.bank, url=hide_password(config.bank.url))))


def save(config: RunConfig, file: Path) -> None:
    """Write what `load` reads back; for its owner alone where `bank.url` holds a password."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    with open(descriptor, "w", encoding="utf-8") as text:
        if holds_password(config.bank.url):
            os.fchmod(descriptor, 0o600)  # before there is anything to read, and also where the file was there
        text.write(dump(config))
