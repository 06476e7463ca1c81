"""Makes docs/configuration.md from megatron_async/config. `--check` only says whether the page is current."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any, get_type_hints

from megatron_async.config import methods, schema
from megatron_async.config.typed import describe_type

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_HEAD = """# Configuration

Made from `megatron_async/config` by `python -m tools.render_config_docs`; do not edit.

A run is one YAML file. Only `name` and `model.path` have no default. Keys are refused unless listed here, with the
nearest one named; types are strict; `--set a.b=c` overrides an option, its value read as YAML. `megatron-async launch
--config FILE --dry-run` prints the resolved options. `auto` and `null` are decided as the option says.
"""


def field_texts(cls: type) -> dict[str, str]:
    """The text under each field of a dataclass, unwrapped."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for node, following in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            texts[node.target.id] = " ".join(str(following.value.value).split())
    return texts


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    return f"`{list(value) if isinstance(value, tuple) else value}`" if value != "" else '`""`'


def _table(cls: type, prefix: str) -> list[str]:
    hints, texts = get_type_hints(cls), field_texts(cls)
    lines = ["| option | type | default | meaning and consequence |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            continue
        cells = [
            f"`{prefix}{field.name}`",
            describe_type(hints[field.name]),
            _default(field),
            texts[field.name],
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _sections(cls: type, prefix: str) -> list[str]:
    """The sections of a class, each followed by those within it."""
    lines = []
    for name, section in get_type_hints(cls).items():
        if dataclasses.is_dataclass(section):
            assert isinstance(section, type)
            where = f"{prefix}{name}"
            lines += [f"## `{where}`", "", inspect.getdoc(section) or "", "", *_table(section, f"{where}.")]
            lines += _sections(section, f"{where}.")
    return lines


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _methods() -> list[str]:
    lines = [
        "## Methods (`objective.name`)",
        "",
        "| method | meaning | anchors | weights | options |",
        "|---|---|---|---|---|",
    ]
    for name, method in methods.METHODS.items():
        options = ", ".join(f"`{key}` = {option.default}" for key, option in method.options.items())
        cells = [
            f"`{name}`",
            method.meaning,
            ", ".join(method.anchors) or "–",
            ", ".join(method.weights),
            options or "–",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "The first anchor and the first weight are the ones that `auto` takes.", ""]
    lines += [
        "## Anchors (`objective.anchor`)",
        "",
        "| anchor | meaning | exact | built in | options |",
        "|---|---|---|---|---|",
    ]
    for name, anchor in methods.ANCHORS.items():
        options = ", ".join(f"`{key}` = {option.default}" for key, option in anchor.options.items())
        lines.append(
            f"| `{name}` | {anchor.meaning} | {_yes(anchor.exact)} | {_yes(anchor.built)} | {options or '–'} |"
        )
    lines += ["", "## Advantages (`advantage.name`)", "", "| estimator | meaning | window |", "|---|---|---|"]
    lines += [f"| `{name}` | {e.meaning} | {e.window or '–'} |" for name, e in methods.ADVANTAGES.items()]
    return [*lines, ""]


def render() -> str:
    """The page as Markdown."""
    lines = [_HEAD, "## Run", "", *_table(schema.RunConfig, ""), *_sections(schema.RunConfig, "")]
    return "\n".join([*lines, *_methods()])


def main(arguments: list[str]) -> int:
    """Write the page, or with --check compare; returns the exit code."""
    text = render()
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
    if not current:
        print(f"{PAGE} is not current: run python -m tools.render_config_docs", file=sys.stderr)
    return 0 if current else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
