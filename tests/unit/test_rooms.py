"""Who may know whom: imports of the source, also those inside functions, but not those for type checkers alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


PACKAGES = ("megatron_async", "sglang_bridge")
FILES = {_name(file): file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _nodes(node)


def _imported(module: str) -> Iterator[str]:
    for node in _nodes(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom) and node.module in FILES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else node.module


@cache
def imports() -> dict[str, set[str]]:
    """Module -> modules that it names in an import."""
    return {module: set(_imported(module)) - {module} for module in FILES}


def room(module: str) -> str:
    """A folder of megatron_async, a file beside them, or the bridge."""
    first, *rest = module.split(".")
    return first if first == "sglang_bridge" or not rest else f"{first}.{rest[0]}"


def rooms() -> dict[str, set[str]]:
    """Room -> rooms that it imports from."""
    found: dict[str, set[str]] = {}
    for module, targets in imports().items():
        found.setdefault(room(module), set()).update(room(target) for target in targets)
    return {name: targets - {name, "megatron_async"} for name, targets in found.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Some circle of the graph, its first element last again; empty where there is none."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph.get(node, ())):
            if found := walk(target, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for start in sorted(graph) if (found := walk(start, []))), [])


def test_circles_are_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_no_room_imports_one_that_imports_it() -> None:
    """Not by way of others either."""
    assert circle(rooms()) == []


def test_no_modules_import_each_other() -> None:
    assert circle(imports()) == []


@pytest.mark.parametrize(
    ("name", "never"),
    [
        ("config", {"bank", "engine", "rollout", "training", "observe", "snapshots", "old_logits", "trajectory"}),
        ("trajectory", {"config", "bank", "engine", "rollout", "training", "observe"}),
        ("objectives", {"bank", "engine", "rollout", "training", "snapshots", "old_logits"}),
        ("advantages", {"bank", "engine", "rollout", "training", "snapshots", "old_logits"}),
        ("bank", {"config", "engine", "rollout", "training"}),
        ("engine", {"bank", "rollout", "training", "snapshots"}),
        ("snapshots", {"config", "engine", "bank", "rollout", "training", "old_logits"}),
        ("rollout", {"engine", "training", "old_logits", "snapshots", "objectives"}),
        ("observe", {"bank", "engine", "rollout", "training"}),
    ],
)
def test_a_room_does_not_reach(name: str, never: set[str]) -> None:
    """Directly or by way of others."""
    graph, reached, todo = rooms(), set[str](), [f"megatron_async.{name}"]
    while todo:
        for target in graph.get(todo.pop(), set()) - reached:
            reached.add(target)
            todo.append(target)
    assert not reached & {f"megatron_async.{other}" for other in never}


def test_the_bridge_is_usable_alone() -> None:
    assert rooms()["sglang_bridge"] == set()
