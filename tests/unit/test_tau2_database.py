"""Shared records: private before they can change, and fingerprints equal exactly when the states are."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from megatron_async.rollout.environments.tau2.database import fingerprint, layered, reading


class Part(BaseModel):
    name: str
    amounts: dict[str, float]


class Store(BaseModel):
    left: dict[str, Part]
    right: dict[str, Part]


class Listed(BaseModel):
    parts: list[Part]

    def get_hash(self) -> str:
        return self.model_dump_json()


def store() -> Store:
    def parts(prefix: str) -> dict[str, Part]:
        return {f"{prefix}{i}": Part(name=f"{prefix}{i}", amounts={"x": float(i)}) for i in range(4)}

    return Store(left=parts("l"), right=parts("r"))


def reference(database: Any) -> str:
    """The benchmark's own definition of a state: the sorted JSON of the whole dump."""
    return json.dumps(database.model_dump(), sort_keys=True, default=str)


TEMPLATE = store()
KEYS = st.sampled_from(["l0", "l1", "l2", "new"])
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["change", "values", "items", "get", "replace", "delete", "pop", "undo"]), KEYS
    ),
    max_size=8,
)


def apply(database: Any, operation: str, key: str) -> None:
    """One change, written as a tool would write it."""
    table = database.left
    if operation == "change" and key in table:
        table[key].amounts["x"] += 1
    elif operation == "undo" and key in table:
        table[key].amounts["x"] -= 1
    elif operation == "values":
        next(iter(table.values()), Part(name="", amounts={})).amounts["y"] = 2.0
    elif operation == "items":
        for name, part in table.items():
            if name == key:
                part.name = "renamed"
    elif operation == "get":
        found = table.get(key)
        if found is not None:
            found.name += "!"
    elif operation == "replace":
        table[key] = Part(name=key, amounts={"x": 9.0})
    elif operation == "delete" and key in table:
        del table[key]
    elif operation == "pop" and key in table:
        table["moved"] = table.pop(key)
        table["moved"].name = "moved"


@given(OPERATIONS, OPERATIONS)
def test_layered_database_behaves_as_a_deep_copy(first: Any, second: Any) -> None:
    pristine = reference(TEMPLATE)
    states, prints = [], []
    for operations in (first, second):
        ours, whole = layered(TEMPLATE), copy.deepcopy(TEMPLATE)
        for operation, key in operations:
            apply(ours, operation, key)
            apply(whole, operation, key)
        assert reference(ours) == reference(whole)
        states.append(reference(whole))
        prints.append(fingerprint(ours))
    assert (prints[0] == prints[1]) == (states[0] == states[1])
    assert reference(TEMPLATE) == pristine


def test_untouched_database_shares_every_record() -> None:
    database = layered(TEMPLATE)
    with reading(database):
        assert database.left["l1"] is TEMPLATE.left["l1"]  # type: ignore[attr-defined]
        assert all(a is b for a, b in zip(database.right.values(), TEMPLATE.right.values()))  # type: ignore[attr-defined]
    assert database.left["l1"] is not TEMPLATE.left["l1"]  # type: ignore[attr-defined]
    assert fingerprint(database) == fingerprint(layered(TEMPLATE))


def test_writing_is_back_after_an_error_while_reading() -> None:
    database: Any = layered(TEMPLATE)
    with pytest.raises(KeyError, match="gone"), reading(database, None):
        database.left["gone"]
    database.left["l0"].name = "changed"
    assert TEMPLATE.left["l0"].name == "l0"


def test_integer_in_place_of_a_float_is_another_state() -> None:
    # 1 == 1.0 in Python, but the benchmark compares their JSON
    first: Any = layered(TEMPLATE)
    second: Any = layered(TEMPLATE)
    first.left["l1"].amounts["x"] = 1
    second.left["l1"].amounts["x"] = 1.0
    assert reference(first) != reference(second)
    assert fingerprint(first) != fingerprint(second)


def test_database_of_lists_is_copied_whole() -> None:
    template = Listed(parts=[Part(name="a", amounts={})])
    database: Any = layered(template)
    database.parts[0].name = "b"
    assert template.parts[0].name == "a"
    assert fingerprint(database) != fingerprint(template)
    assert fingerprint(layered(template)) == fingerprint(template)
