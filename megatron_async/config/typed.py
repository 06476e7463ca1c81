"""From plain YAML values to the typed dataclasses of the schema, strictly, and back.

Invariants: no value is converted silently except int to float; every problem is reported with its dotted key; an
unknown key names the nearest legal one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron_async.config.errors import ConfigError, nearest

T = TypeVar("T")


class _Mismatch(Exception):
    """A value does not have the declared type; carries the text after the key."""


def describe_type(kind: Any) -> str:
    """How a type is called in a message to the user."""
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(kind))
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else describe_type(part) for part in get_args(kind))
    if origin is tuple:
        return f"a list of {describe_type(get_args(kind)[0])}"
    if origin is dict or dataclasses.is_dataclass(kind):
        return "a mapping"
    return {int: "an integer", float: "a number", str: "a text", bool: "true or false", Any: "anything"}.get(
        kind, str(kind)
    )


def _scalar(kind: Any, value: Any) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isnan(value):
            raise _Mismatch("is not a number (nan)")
        return float(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise _Mismatch(f"expected {describe_type(kind)}, got {value!r} ({type(value).__name__})")


def _literal(kind: Any, value: Any) -> Any:
    legal = get_args(kind)
    if value in legal:
        return value
    hint = difflib.get_close_matches(str(value), [str(word) for word in legal], n=1)
    raise _Mismatch(
        f"expected {describe_type(kind)}, got {value!r}" + (f"; did you mean {hint[0]!r}?" if hint else "")
    )


def _union(kind: Any, value: Any) -> Any:
    parts = get_args(kind)
    if value is None and type(None) in parts:
        return None
    for part in (p for p in parts if p is not type(None)):
        if part is bool and isinstance(value, bool):
            return value
        if get_origin(part) is Literal and value in get_args(part):
            return value
        if part in (int, str) and isinstance(value, part) and not isinstance(value, bool):
            return value
        if part is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    raise _Mismatch(f"expected {describe_type(kind)}, got {value!r} ({type(value).__name__})")


def _container(kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _Mismatch(f"expected {describe_type(kind)}, got {value!r} ({type(value).__name__})")
        return tuple(_convert(get_args(kind)[0], item) for item in value)
    if not isinstance(value, Mapping):
        raise _Mismatch(f"expected {describe_type(kind)}, got {value!r} ({type(value).__name__})")
    return {_convert(str, key): _convert(get_args(kind)[1], item) for key, item in value.items()}


def _convert(kind: Any, value: Any) -> Any:
    """`value` as `kind`; raises _Mismatch."""
    if kind is Any:
        return value
    origin = get_origin(kind)
    if origin is Literal:
        return _literal(kind, value)
    if origin in (Union, types.UnionType):
        return _union(kind, value)
    if origin in (tuple, dict):
        return _container(kind, value)
    return _scalar(kind, value)


def section_of(kind: Any) -> type | None:
    """The dataclass that a field holds, also one that may be null; None for a plain value."""
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return next((part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)), None)


def _fields_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls)}


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _build(cls: type[T], data: Any, prefix: str, problems: list[str]) -> T | None:
    """One dataclass from a mapping; appends to `problems` and returns None where that is not possible."""
    if not isinstance(data, Mapping):
        problems.append(f"{prefix.rstrip('.') or 'the file'}: expected a mapping of options, got {data!r}")
        return None
    fields, hints, before = _fields_of(cls), get_type_hints(cls), len(problems)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in fields:
            problems.append(f"{prefix}{key}: unknown key; {_hint(str(key), cls, prefix)}")
        elif (section := section_of(hints[key])) is not None:
            left_out = value is None and section is not hints[key]
            values[key] = None if left_out else _build(section, value, f"{prefix}{key}.", problems)
        else:
            try:
                values[key] = _convert(hints[key], value)
            except _Mismatch as mismatch:
                problems.append(f"{prefix}{key}: {mismatch}")
    for name, field in fields.items():
        if name not in data and _is_required(field):
            problems.append(f"{prefix}{name}: is required and missing")
    return cls(**values) if len(problems) == before else None


def _hint(key: str, cls: type, prefix: str) -> str:
    """The nearest legal key: in this section first, then anywhere (a key in the wrong section is a common slip)."""
    from megatron_async.config.schema import RunConfig

    close = difflib.get_close_matches(key, _fields_of(cls), n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    everywhere = dotted_keys(RunConfig)
    elsewhere = [dotted for dotted in everywhere if dotted.rsplit(".", 1)[-1] == key]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return nearest(key, _fields_of(cls))


def dotted_keys(cls: type, prefix: str = "") -> list[str]:
    """All keys of a section and the sections under it, as `a.b`."""
    hints, keys = get_type_hints(cls), []
    for name in _fields_of(cls):
        if dataclasses.is_dataclass(hints[name]):
            keys += dotted_keys(hints[name], f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            keys.append(f"{prefix}{name}")
    return keys


def build(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass `cls` from plain values; raises ConfigError with every problem."""
    problems: list[str] = []
    result = _build(cls, data, "", problems)
    if result is None:
        raise ConfigError(problems, where)
    return result


def to_plain(value: Any) -> Any:
    """Dataclasses and tuples as dicts and lists, ready for YAML or JSON; the inverse of `build`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return value
